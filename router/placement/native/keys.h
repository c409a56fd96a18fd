/* A prompt's tokens, and the keys of its blocks: BLAKE3 in its keyed mode, asked for its first 16 bytes at the end of every block.

   common/block_identity.py says what is hashed, and is what this is tested against. Without SIMD: a block of 16 tokens is one
   compression, and what asking costs besides (one more, and one for every level of the tree) is most of it. */

#include <stdint.h>
#include <string.h>

#define CHUNK_BYTES 1024
#define LEVELS 54

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, KEYED = 16 };

static const uint32_t START[4] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A};
static const uint8_t WORDS[7][16] = { /* of the block, in the order of each round */
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

/* What is still to be compressed, with all that goes along. */
typedef struct {
    uint32_t chain[8], words[16];
    uint64_t counter;
    uint32_t size, flags;
} Input;

typedef struct {
    uint32_t key[8];
    uint32_t left[LEVELS][8]; /* subtrees that wait for their right half */
    int64_t depth;
    Input at;                 /* the block that is being filled; its words are bytes so far */
    uint32_t blocks;          /* of the present chunk, before it */
} Hasher;

static inline uint32_t turned(uint32_t x, int by) { return x >> by | x << (32 - by); }

static inline __attribute__((always_inline)) void mix(uint32_t *s, int a, int b, int c, int d, uint32_t one, uint32_t two) {
    s[a] += s[b] + one;
    s[d] = turned(s[d] ^ s[a], 16);
    s[c] += s[d];
    s[b] = turned(s[b] ^ s[c], 12);
    s[a] += s[b] + two;
    s[d] = turned(s[d] ^ s[a], 8);
    s[c] += s[d];
    s[b] = turned(s[b] ^ s[c], 7);
}

/* The first eight words of the output. */
static void compress(const Input *in, uint32_t flags, uint32_t *out) {
    uint32_t s[16];
    const uint32_t *m = in->words;
    memcpy(s, in->chain, 32);
    memcpy(s + 8, START, 16);
    s[12] = (uint32_t)in->counter;
    s[13] = (uint32_t)(in->counter >> 32);
    s[14] = in->size;
    s[15] = flags;
#pragma GCC unroll 7 /* then every index is a constant, and the state stays in registers */
    for (int round = 0; round < 7; round++) {
        const uint8_t *at = WORDS[round];
        mix(s, 0, 4, 8, 12, m[at[0]], m[at[1]]);
        mix(s, 1, 5, 9, 13, m[at[2]], m[at[3]]);
        mix(s, 2, 6, 10, 14, m[at[4]], m[at[5]]);
        mix(s, 3, 7, 11, 15, m[at[6]], m[at[7]]);
        mix(s, 0, 5, 10, 15, m[at[8]], m[at[9]]);
        mix(s, 1, 6, 11, 12, m[at[10]], m[at[11]]);
        mix(s, 2, 7, 8, 13, m[at[12]], m[at[13]]);
        mix(s, 3, 4, 9, 14, m[at[14]], m[at[15]]);
    }
    for (int i = 0; i < 8; i++) out[i] = s[i] ^ s[i + 8];
}

static void empty_block(Hasher *h) {
    memset(h->at.words, 0, 64);
    h->at.size = 0;
}

static void begin_chunk(Hasher *h, uint64_t number) {
    memcpy(h->at.chain, h->key, 32);
    h->at.counter = number;
    h->blocks = 0;
    empty_block(h);
}

static uint32_t flags_of(const Hasher *h, uint32_t more) { return KEYED | more | (h->blocks ? 0 : CHUNK_START); }

static void join(const Hasher *h, const uint32_t *left, const uint32_t *right, Input *parent) {
    memcpy(parent->chain, h->key, 32);
    memcpy(parent->words, left, 32);
    memcpy(parent->words + 8, right, 32);
    parent->counter = 0;
    parent->size = 64;
    parent->flags = KEYED | PARENT;
}

/* A chunk is full, and more comes: it and the subtrees that it completes go onto the stack. */
static void end_chunk(Hasher *h) {
    uint32_t chain[8];
    compress(&h->at, flags_of(h, CHUNK_END), chain);
    uint64_t chunks = h->at.counter + 1;
    for (uint64_t whole = chunks; !(whole & 1); whole >>= 1) {
        Input parent;
        join(h, h->left[--h->depth], chain, &parent);
        compress(&parent, parent.flags, chain);
    }
    memcpy(h->left[h->depth++], chain, 32);
    begin_chunk(h, chunks);
}

static void feed(Hasher *h, const uint8_t *data, int64_t size) {
    while (size) {
        if (h->at.size == 64) { /* only now: the last block of a chunk is another's matter */
            if (64 * (h->blocks + 1) == CHUNK_BYTES) {
                end_chunk(h);
            } else {
                uint32_t chain[8];
                compress(&h->at, flags_of(h, 0), chain);
                memcpy(h->at.chain, chain, 32);
                h->blocks++;
                empty_block(h);
            }
        }
        int64_t take = 64 - h->at.size < size ? 64 - h->at.size : size;
        memcpy((uint8_t *)h->at.words + h->at.size, data, take);
        h->at.size += take;
        data += take;
        size -= take;
    }
}

/* What the hash of all that was fed begins with; more may be fed afterwards. */
static void ask(const Hasher *h, uint8_t *out) {
    Input last = h->at, parent;
    uint32_t chain[8];
    last.flags = flags_of(h, CHUNK_END);
    for (int64_t level = h->depth; level > 0; level--) {
        compress(&last, last.flags, chain);
        join(h, h->left[level - 1], chain, &parent);
        last = parent;
    }
    compress(&last, last.flags | ROOT, chain); /* a lone chunk's counter is 0, as the root's must be */
    memcpy(out, chain, 16);
}

/* key: 32 bytes. opening: what comes before the tokens. tokens: [blocks * block_size]. out: [blocks, 16]. */
EXPORT void diptych_keys(
    const uint8_t *key, const uint8_t *opening, int64_t opening_size, const uint32_t *tokens, int64_t blocks,
    int64_t block_size, uint8_t *out) {
    Hasher h;
    memcpy(h.key, key, 32);
    h.depth = 0;
    begin_chunk(&h, 0);
    feed(&h, opening, opening_size);
    for (int64_t i = 0; i < blocks; i++) {
        feed(&h, (const uint8_t *)(tokens + i * block_size), 4 * block_size);
        ask(&h, out + 16 * i);
    }
}

/* packed: a TokenIdsInput, encoded. out: room for `count` ids.
   Returns: the largest id, or -1 unless there are exactly `count`, each below 2^32, and nothing else. */
EXPORT int64_t diptych_unpack(const uint8_t *packed, int64_t size, int64_t count, uint32_t *out) {
    int64_t at = 0, most = 0, found = -1; /* the first number is their size in bytes */
    if (!size || packed[at++] != 0x0A) return -1;
    while (at < size) {
        uint64_t number = 0;
        for (int shift = 0;; shift += 7) {
            if (at == size || shift > 28) return -1;
            uint8_t part = packed[at++];
            number |= (uint64_t)(part & 0x7F) << shift;
            if (!(part & 0x80)) break;
        }
        if (found < 0) {
            if (number != (uint64_t)(size - at)) return -1;
        } else {
            if (found == count || number >> 32) return -1;
            out[found] = (uint32_t)number;
            if ((int64_t)number > most) most = (int64_t)number;
        }
        found++;
    }
    return found == count ? most : -1;
}
