/* Scattered blocks of KV into one flat range and back, with the range's XXH3-64 made on the way: what was copied is summed while
 * it still is in the first cache, so a range passes memory once and not twice.
 *
 * A range is whole blocks as they lie in the pool (or `block_bytes` of each: some layers), then the tail block's rows, of each
 * the first `tail_bytes`. XXH3 is the published algorithm with its default secret, for more than 240 bytes. */
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define PIECE 8192 /* of a copy: source and target stay in the first cache until they are summed */
#define STRIPE 64
#define STRIPES 16 /* in a block of the hash: (secret - stripe) / 8 */
#define HASH_BLOCK (STRIPE * STRIPES)
#define SECRET 192

typedef uint64_t u64;
typedef u64 half __attribute__((vector_size(STRIPE / 2)));

static const u64 P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const u64 P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u,
                 P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline u64 word(const uint8_t *at)
{
    u64 value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline half load(const uint8_t *at)
{
    half value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* The products of the lanes' lower and upper 32 bits. */
static inline half products(half value)
{
#ifdef __AVX2__
    return (half)_mm256_mul_epu32((__m256i)value, _mm256_shuffle_epi32((__m256i)value, 0x31));
#else
    return (value & 0xffffffffu) * (value >> 32);
#endif
}

/* A range that grows at its end. done: summed so far; inner: bytes in whole blocks of the hash before the last stripe. */
typedef struct {
    const uint8_t *data;
    int64_t size, done, inner;
    half a, b;
} Hash;

static Hash hash_of(const uint8_t *data, int64_t size)
{
    return (Hash){data, size, 0, (size - 1) / HASH_BLOCK * HASH_BLOCK, {P32_3, P64_1, P64_2, P64_3}, {P64_4, P32_2, P64_5, P32_1}};
}

/* Each lane's neighbour in its pair. */
static inline half neighbours(half value)
{
#ifdef __AVX2__
    return (half)_mm256_shuffle_epi32((__m256i)value, 0x4e);
#else
    return (half){value[1], value[0], value[3], value[2]};
#endif
}

static inline void stripe(half *a, half *b, const uint8_t *data, const uint8_t *key)
{
    half left = load(data), right = load(data + 32);
    *a += neighbours(left) + products(left ^ load(key));
    *b += neighbours(right) + products(right ^ load(key + 32));
}

/* Sum the whole blocks of the hash that lie before `end`. */
static void advance(Hash *hash, int64_t end)
{
    int64_t until = end < hash->inner ? end / HASH_BLOCK * HASH_BLOCK : hash->inner;
    half a = hash->a, b = hash->b;
    for (; hash->done < until; hash->done += HASH_BLOCK) {
        const uint8_t *data = hash->data + hash->done;
        for (int i = 0; i < STRIPES; i++)
            stripe(&a, &b, data + i * STRIPE, secret + 8 * i);
        a = (a ^ (a >> 47) ^ load(secret + SECRET - STRIPE)) * P32_1;
        b = (b ^ (b >> 47) ^ load(secret + SECRET - STRIPE / 2)) * P32_1;
    }
    hash->a = a, hash->b = b;
}

static u64 finish(Hash *hash)
{
    advance(hash, hash->size);
    half a = hash->a, b = hash->b;
    const uint8_t *data = hash->data;
    int64_t rest = (hash->size - 1 - hash->inner) / STRIPE;
    for (int64_t i = 0; i < rest; i++)
        stripe(&a, &b, data + hash->inner + i * STRIPE, secret + 8 * i);
    stripe(&a, &b, data + hash->size - STRIPE, secret + SECRET - STRIPE - 7);
    const u64 sums[8] = {a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]};
    u64 value = (u64)hash->size * P64_1;
    for (int i = 0; i < 8; i += 2) {
        u64 left = sums[i] ^ word(secret + 11 + 8 * i), right = sums[i + 1] ^ word(secret + 19 + 8 * i);
        unsigned __int128 product = (unsigned __int128)left * right;
        value += (u64)product ^ (u64)(product >> 64);
    }
    value = (value ^ (value >> 37)) * 0x165667919E3779F9u;
    return value ^ (value >> 32);
}

/* Past the caches: the target is not read before it is written, and pushes nothing out. */
static void stream(uint8_t *to, const uint8_t *from, int64_t size)
{
#ifdef __AVX2__
    if (((uintptr_t)to & 31) == 0) {
        int64_t whole = size / 128 * 128;
        for (int64_t i = 0; i < whole; i += 128) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(from + i)), b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
            __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64)), d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
            _mm256_stream_si256((__m256i *)(to + i), a);
            _mm256_stream_si256((__m256i *)(to + i + 32), b);
            _mm256_stream_si256((__m256i *)(to + i + 64), c);
            _mm256_stream_si256((__m256i *)(to + i + 96), d);
        }
        to += whole, from += whole, size -= whole;
    }
#endif
    memcpy(to, from, size);
}

/* pool: where block 0's part begins; stride: bytes from one block to the next; ids: num_full blocks, and the tail's behind them. */
EXPORT u64 diptych_gather(const uint8_t *pool, int64_t stride, const int64_t *ids, int64_t num_full, int64_t block_bytes,
                          int64_t rows, int64_t row_stride, int64_t tail_bytes, uint8_t *out)
{
    uint8_t *to = out;
    Hash hash = hash_of(out, num_full * block_bytes + (tail_bytes ? rows * tail_bytes : 0));
    for (int64_t i = 0; i < num_full; i++) {
        const uint8_t *from = pool + ids[i] * stride;
        for (int64_t at = 0; at < block_bytes; at += PIECE) {
            int64_t size = block_bytes - at < PIECE ? block_bytes - at : PIECE;
            memcpy(to, from + at, size);
            to += size;
            advance(&hash, to - out);
        }
    }
    for (int64_t row = 0; tail_bytes && row < rows; row++, to += tail_bytes)
        memcpy(to, pool + ids[num_full] * stride + row * row_stride, tail_bytes);
    return finish(&hash);
}

/* The inverse, past the caches: nobody reads these blocks before the next step. */
EXPORT void diptych_scatter(uint8_t *pool, int64_t stride, const int64_t *ids, int64_t num_full, int64_t block_bytes, int64_t rows,
                            int64_t row_stride, int64_t tail_bytes, const uint8_t *in)
{
    for (int64_t i = 0; i < num_full; i++, in += block_bytes)
        stream(pool + ids[i] * stride, in, block_bytes);
    for (int64_t row = 0; tail_bytes && row < rows; row++, in += tail_bytes)
        memcpy(pool + ids[num_full] * stride + row * row_stride, in, tail_bytes);
#ifdef __AVX2__
    _mm_sfence(); /* whoever is told that the blocks are filled sees them filled */
#endif
}
