/* Portable vectors: GCC and Clang's vector extension at the width of the machine that compiles.
 *
 * LANES  floats of one vector: as the compiler is told, else of one register
 * TILE   rows of x that one pass over a panel of weights serves
 * PANEL  columns (outputs) of one panel; TILE * PANEL / LANES accumulators, PANEL / LANES weights and a broadcast fill the
 *        register file.
 */
#ifndef DIPTYCH_VECTORS_H
#define DIPTYCH_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#if LANES == 16
#define TILE 12
#define VECS 2
#elif LANES == 8
#define TILE 6
#define VECS 2
#elif defined(__aarch64__)
#define TILE 6
#define VECS 4
#else
#define TILE 5
#define VECS 2
#endif
#define PANEL (LANES * VECS)
#if TILE >= 12
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif TILE >= 6
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const unaligned *)from; }
INLINE void store(float *to, vec value) { *(unaligned *)to = value; }
INLINE vec spread(float value) { return value - (vec){0}; }
INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Always in the same order: halves, quarters, ... */
INLINE float sum_lanes(vec v) {
#if LANES == 16
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif LANES == 8
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
#else
    v += SHUFFLE(v, v, 2, 3, 0, 1);
#endif
    return v[0] + v[1];
}

/* The sums of LANES vectors, each in sum_lanes' order. Not inlined: at many places it would be a good part of all code. */
static __attribute__((noinline)) vec sum_each(const vec *v) {
#if LANES == 8
    vec half[4], quarter[2];
    for (int i = 0; i < 4; i++)
        half[i] = SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        quarter[i] = SHUFFLE(half[i], half[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
                     SHUFFLE(half[i], half[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(quarter[0], quarter[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           SHUFFLE(quarter[0], quarter[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
    vec sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_lanes(v[i]);
    return sums;
#endif
}

/* e^x to about 1e-7 relative; NaN stays NaN; below -87.3 the least normal number. */
INLINE vec exp_lanes(vec x) {
    const vec shift = spread(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = choose(x > spread(88.3f), spread(88.3f), x);
    x = choose(x < spread(-87.3f), spread(-87.3f), x);
    vec shifted = x * spread(1.44269504f) + shift;
    vec n = shifted - shift;
    vec r = x - n * spread(0.693359375f);
    r = r - n * spread(-2.12194440e-4f);
    vec p = spread(1.9875691500e-4f);
    p = p * r + spread(1.3981999507e-3f);
    p = p * r + spread(8.3334519073e-3f);
    p = p * r + spread(4.1665795894e-2f);
    p = p * r + spread(1.6666665459e-1f);
    p = p * r + spread(5.0000001201e-1f);
    p = p * (r * r) + r + spread(1.0f);
    ivec exponent = ((ivec)shifted - (ivec)shift + 127) << 23;
    return p * (vec)exponent;
}

/* tanh to about 2e-7 relative, also near 0; NaN stays NaN. */
INLINE vec tanh_lanes(vec x) {
    vec square = x * x, p = spread(-5.70498872745e-3f);
    p = p * square + spread(2.06390887954e-2f);
    p = p * square + spread(-5.37397155531e-2f);
    p = p * square + spread(1.33314422036e-1f);
    p = p * square + spread(-3.33332819422e-1f);
    vec near = p * square * x + x;
    vec size = choose(x < spread(0.0f), -x, x);
    vec far = spread(1.0f) - spread(2.0f) / (exp_lanes(size + size) + spread(1.0f));
    return choose(size < spread(0.625f), near, choose(x < spread(0.0f), -far, far));
}

#endif
