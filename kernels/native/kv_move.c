/* Scattered blocks of KV into one flat range and back, with the range's XXH3-64 made on the way: what was copied is summed while
 * it still is in the first cache, so a range passes memory once and not twice.
 *
 * A range is whole blocks as they lie in the pool (or `block_bytes` of each: some layers), then the tail block's rows, of each
 * the first `tail_bytes`. */
#include <stdint.h>
#include <string.h>

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define PIECE 8192 /* of a copy: source and target stay in the first cache until they are summed */

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
EXPORT uint64_t diptych_gather(const uint8_t *pool, int64_t stride, const int64_t *ids, int64_t num_full, int64_t block_bytes,
                               int64_t rows, int64_t row_stride, int64_t tail_bytes, uint8_t *to)
{
    XXH3_state_t hash;
    XXH3_INITSTATE(&hash);
    XXH3_64bits_reset(&hash);
    for (int64_t i = 0; i < num_full; i++) {
        const uint8_t *from = pool + ids[i] * stride;
        for (int64_t at = 0; at < block_bytes; at += PIECE) {
            int64_t size = block_bytes - at < PIECE ? block_bytes - at : PIECE;
            memcpy(to, from + at, size);
            XXH3_64bits_update(&hash, to, size);
            to += size;
        }
    }
    for (int64_t row = 0; tail_bytes && row < rows; row++, to += tail_bytes) {
        memcpy(to, pool + ids[num_full] * stride + row * row_stride, tail_bytes);
        XXH3_64bits_update(&hash, to, tail_bytes);
    }
    return XXH3_64bits_digest(&hash);
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
