/* A prompt's tokens, and the keys of its blocks: BLAKE3 in its keyed mode, asked for its first 16 bytes at the end of every block.
   common/block_identity.py says what is hashed, and is what this is tested against. */

#include <stdint.h>

#include "blake3/blake3.h"

/* key: 32 bytes. opening: what comes before the tokens. tokens: [blocks * block_size]. out: [blocks, 16]. */
EXPORT void diptych_keys(
    const uint8_t *key, const uint8_t *opening, int64_t opening_size, const uint32_t *tokens, int64_t blocks,
    int64_t block_size, uint8_t *out) {
    blake3_hasher hasher;
    blake3_hasher_init_keyed(&hasher, key);
    blake3_hasher_update(&hasher, opening, opening_size);
    for (int64_t i = 0; i < blocks; i++) {
        blake3_hasher_update(&hasher, tokens + i * block_size, 4 * block_size);
        blake3_hasher_finalize(&hasher, out + 16 * i, 16);
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
