/* bfloat16: the upper half of a float. */
#ifndef DIPTYCH_BFLOAT_H
#define DIPTYCH_BFLOAT_H

#include "vectors.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef uint32_t float_bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t bfloats __attribute__((vector_size(LANES * 2)));
typedef uint16_t bfloats_unaligned __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

/* By name: see widen in kv_codes.h. */
INLINE vec load_bfloats(const uint16_t *from) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)((float_bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
#elif LANES == 8 && defined(__AVX2__)
    return (vec)((float_bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)) << 16);
#else
    return (vec)(__builtin_convertvector((bfloats) * (const bfloats_unaligned *)from, float_bits) << 16);
#endif
}

/* To the nearest, half to even; what is no number stays none. */
INLINE void store_bfloats(uint16_t *to, vec x) {
    float_bits bits = (float_bits)x, strange = (float_bits)(x != x), up = bits + 0x7fff + (bits >> 16 & 1);
    up = (up & ~strange) | ((bits | 0x400000) & strange);
#if LANES == 16 && defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)(up >> 16)));
#else
    *(bfloats_unaligned *)to = __builtin_convertvector(up >> 16, bfloats);
#endif
}

#endif
