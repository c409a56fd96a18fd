/* A quantized KV cache: codes and scales as kernels/kv_codes.py says, bit for bit.
 *
 *     slot    [head 0 codes][head 1 codes] ... [scale 0][scale 1] ...
 *
 * Codes are decoded to floats, code * scale, where they are read: attention over them is that over floats, and a result has one
 * order of sums whatever the codes are.
 */
#ifndef DIPTYCH_KV_CODES_H
#define DIPTYCH_KV_CODES_H

#include "bfloat.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

enum kv_codes { FLOATS, INT8, E4M3, E5M2, BFLOATS }; /* FLOATS: the elements are stored as they are; BFLOATS: rounded to bfloat16 */

typedef int8_t code_lanes __attribute__((vector_size(LANES)));
typedef int8_t unaligned_codes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* Without a scale: attention of single rows reads them where they lie. */
INLINE int is_plain(long codes) { return codes == FLOATS || codes == BFLOATS; }

/* Floats that so many elements without a scale take up. count: even. */
INLINE long plain_floats(long codes, long count) { return codes == BFLOATS ? count / 2 : count; }

/* Floats of a slot. */
INLINE long slot_floats(long codes, long heads, long dim) {
    return is_plain(codes) ? plain_floats(codes, heads * dim) : heads * (dim / 4 + 1);
}

/* LANES elements of a row without a scale, from `at` on. */
INLINE vec load_plain(const int codes, const float *row, long at) {
    return codes == BFLOATS ? load_bfloats((const uint16_t *)row + at) : load(row + at);
}

/* By name: GCC 12 makes one instruction a lane of the conversion. */
INLINE ivec widen(const int8_t *from) {
#if LANES == 16 && defined(__AVX512F__)
    return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8 && defined(__AVX2__)
    return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector((code_lanes) * (const unaligned_codes *)from, ivec);
#endif
}

INLINE vec decode_lanes(const int kind, const int8_t *from) {
    ivec code = widen(from);
    if (kind == INT8) return __builtin_convertvector(code, vec);
    /* The mantissa moves to its place, and the exponent is counted from another zero; codes without a leading one get it, and lose
     * it again by a subtraction. */
    const int shift = kind == E4M3 ? 20 : 21, bias = (kind == E4M3 ? 120 : 112) << 23, first = kind == E4M3 ? 8 : 4;
    ivec size = code & 0x7f, least = (ivec){0} + (bias + (1 << 23));
    vec tiny = (vec)((size << shift) | least) - (vec)least;
    vec value = choose(size < first, tiny, (vec)((size << shift) + bias));
    return (vec)((ivec)value | (code & INT32_MIN));
}

/* x: at most the largest code in size. To the nearest code, ties to even. */
INLINE void encode_lanes(const int kind, vec x, int8_t *to) {
    ivec code;
    if (kind == INT8) {
        const vec shift = spread(12582912.0f); /* see exp_lanes */
        code = (ivec)(x + shift) - (ivec)shift;
    } else {
        const int shift = kind == E4M3 ? 20 : 21, bias = kind == E4M3 ? 120 << 3 : 112 << 2;
        const vec least = spread(kind == E4M3 ? 0x1p-6f : 0x1p-14f), grid = spread(kind == E4M3 ? 0x1p14f : 0x1p7f);
        ivec bits = (ivec)x & INT32_MAX;
        ivec normal = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - bias;
        ivec tiny = (ivec)((vec)bits + grid) - (ivec)grid;
        ivec where = (vec)bits < least;
        code = (where & tiny) | (~where & normal) | (((ivec)x >> 24) & 0x80);
    }
    *(unaligned_codes *)to = __builtin_convertvector(code, code_lanes);
}

INLINE void decode_head_of(const int kind, const int8_t *codes, float scale, long dim, float *to) {
    for (long d = 0; d < dim; d += LANES) store(to + d, decode_lanes(kind, codes + d) * spread(scale));
}

INLINE void encode_head_of(const int kind, const float *x, long dim, int8_t *codes, float *scale) {
    const float largest = kind == INT8 ? 127.0f : kind == E4M3 ? 448.0f : 57344.0f;
    vec most = {0}, finite = {0}; /* NaN once something was not */
    for (long d = 0; d < dim; d += LANES) {
        vec value = load(x + d), size = (vec)((ivec)value & INT32_MAX);
        most = choose(size > most, size, most);
        finite += value - value;
    }
    float highest = 0.0f;
    for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    int bad = sum_lanes(finite) != 0.0f;
    float unit = highest / largest;
    *scale = bad ? NAN : unit;
    if (bad || unit == 0.0f) {
        memset(codes, 0, dim);
        return;
    }
    for (long d = 0; d < dim; d += LANES) {
        vec value = load(x + d) / spread(unit);
        value = choose(value > spread(largest), spread(largest), value);
        value = choose(value < spread(-largest), spread(-largest), value);
        encode_lanes(kind, value, codes + d);
    }
}

/* Head `head` of a slot as floats. */
INLINE void decode_head(long kind, const float *slot, long heads, long head, long dim, float *to) {
    if (kind == BFLOATS) {
        for (long d = 0; d < dim; d += LANES) store(to + d, load_plain(BFLOATS, slot, head * dim + d));
        return;
    }
    const int8_t *codes = (const int8_t *)slot + head * dim;
    float scale = slot[heads * dim / 4 + head];
    if (kind == INT8) decode_head_of(INT8, codes, scale, dim, to);
    else if (kind == E4M3) decode_head_of(E4M3, codes, scale, dim, to);
    else decode_head_of(E5M2, codes, scale, dim, to);
}

/* All heads of one part of a token into its slot. */
static void encode_slot(long kind, const float *x, long heads, long dim, float *slot) {
    if (kind == BFLOATS) {
        for (long d = 0; d < heads * dim; d += LANES) store_bfloats((uint16_t *)slot + d, load(x + d));
        return;
    }
    for (long head = 0; head < heads; head++) {
        int8_t *codes = (int8_t *)slot + head * dim;
        float *scale = slot + heads * dim / 4 + head;
        if (kind == INT8) encode_head_of(INT8, x + head * dim, dim, codes, scale);
        else if (kind == E4M3) encode_head_of(E4M3, x + head * dim, dim, codes, scale);
        else encode_head_of(E5M2, x + head * dim, dim, codes, scale);
    }
}

#endif
