/* int8 weights and activations: a row is quantized before it meets the weights, to codes and a scale of its own. Products are
 * added up in int32, exactly, so that every instruction set and every width has the same sums.
 *
 * Four inputs are one word of a lane: weight + 128 in its bytes, so that they are unsigned; 128 times the sum of the row's codes is
 * taken off at the end. Sums wrap around on the way and are right again then.
 *
 * DOT_VNNI   four products a lane in one instruction
 * DOT_PAIRS  two of int16 a lane: the even inputs of a word, then the odd ones. (The instruction for bytes saturates.)
 * DOT_PLAIN  one
 */
#ifndef DIPTYCH_INT8_H
#define DIPTYCH_INT8_H

#include "matmul.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint32_t word __attribute__((vector_size(LANES * 4)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t bytes_unaligned __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint32_t word_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
INLINE word load_words(const char *from) { return *(const word_unaligned *)from; }
INLINE word spread_word(uint32_t value) { return value - (word){0}; }

/* A product that is rounded before anything is added to it, as torch's are: the compiler may not fuse the two. */
INLINE vec rounded(vec product) {
    __asm__("" : "+m"(product));
    return product;
}

#if defined(DOT_PLAIN)
#elif LANES == 16 && defined(__AVX512VNNI__)
#define DOT_VNNI
#define DOT(sum, w, x) (word)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x))
#elif LANES == 8 && defined(__AVXVNNI__)
#define DOT_VNNI
#define DOT(sum, w, x) (word)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x))
#elif LANES == 16 && defined(__AVX512BW__)
#define DOT_PAIRS
#define PAIRS(a, b) (word)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#elif LANES == 8 && defined(__AVX2__)
#define DOT_PAIRS
#define PAIRS(a, b) (word)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#elif LANES == 4 && defined(__SSE2__)
#define DOT_PAIRS
#define PAIRS(a, b) (word)_mm_madd_epi16((__m128i)(a), (__m128i)(b))
#else
#define DOT_PLAIN
#endif

#if defined(DOT_PAIRS)
#define CODE_BYTES 2
#define TILE_INT8 (TILE < 12 ? 4 : TILE)
#else
#define CODE_BYTES 1
#define TILE_INT8 TILE
#endif

/* What lies before a row's codes. offset: 128 times the sum of the codes. */
struct quantized_row {
    float scale;
    uint32_t offset;
};

INLINE long int8_words(long inputs) { return ceil_div(inputs, 4); }
INLINE long int8_row_bytes(long inputs) { return LINE + whole_lines(int8_words(inputs) * 4 * CODE_BYTES); }

INLINE vec size_of(vec x) { return choose(x < spread(0.0f), -x, x); }

/* scale = max |x| / 127, codes = x / scale to the nearest, half to even. A row with something in it that is no number has no
 * number for a scale. */
static void quantize_row(const float *x, long inputs, char *to) {
    vec most = {0}, strange = {0};
    float part[LANES] = {0}, highest = 0.0f;
    long whole = inputs - inputs % LANES;
    memcpy(part, x + whole, (inputs - whole) * sizeof(float));
    for (long k = 0; k < inputs; k += LANES) {
        vec value = k < whole ? load(x + k) : load(part), size = size_of(value);
        most = choose(size > most, size, most);
        strange += value - value;
    }
    for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    float scale = highest / 127.0f + sum_lanes(strange);
    const vec shift = spread(12582912.0f), limit = spread(127.0f); /* see exp_lanes */
    ivec total = {0};
    char *codes = to + LINE;
    memset(codes + inputs / 4 * 4 * CODE_BYTES, 0, 4 * CODE_BYTES * (int8_words(inputs) - inputs / 4));
    for (long k = 0; k < inputs; k += LANES) {
        vec code = (k < whole ? load(x + k) : load(part)) / spread(scale);
        code = choose(code > limit, limit, choose(code < -limit, -limit, code));
        ivec rounded_code = (ivec)(code + shift) - (ivec)shift;
        if (!(scale > 0.0f)) rounded_code = (ivec){0};
        total += rounded_code;
        long some = min_long(LANES, inputs - k);
#if defined(DOT_PAIRS)
        int16_t *pairs = (int16_t *)codes + k;
        for (long i = 0; i < some; i++) pairs[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = (int16_t)rounded_code[i]; /* 0 2 1 3 */
#else
        bytes narrow = __builtin_convertvector(rounded_code, bytes);
        memcpy(codes + k, &narrow, some);
#endif
    }
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += (uint32_t)total[i];
    struct quantized_row head = {scale, 128 * sum};
    memcpy(to, &head, sizeof head);
}

INLINE uint32_t word_at(const char *from) {
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

/* Adds the products of a row's word of codes with so many vectors of words of weights. */
INLINE void dot_words(const int vectors, const word *w, const char *codes, word *sum) {
#if defined(DOT_VNNI)
    word x = spread_word(word_at(codes));
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sum[v] = DOT(sum[v], w[v], x);
#elif defined(DOT_PAIRS)
    word even = spread_word(word_at(codes)), odd = spread_word(word_at(codes + 4));
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        sum[v] += PAIRS(w[v] & spread_word(0x00ff00ff), even);
        sum[v] += PAIRS(w[v] >> 8 & spread_word(0x00ff00ff), odd);
    }
#else
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        word x = spread_word((uint32_t)(int32_t)((const int8_t *)codes)[i]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[v] += (w[v] >> (8 * i) & spread_word(255)) * x;
    }
#endif
}

/* See put_rows. */
static __attribute__((noinline)) void put_scaled(const struct linear *job, long row, long rows, const char *weight, long column,
                                                 long panels, const word *sums) {
    for (long r = 0; r < rows; r++) {
        struct quantized_row head;
        memcpy(&head, job->x + (row + r) * job->x_step, sizeof head);
        for (long v = 0; v < panels * VECS; v++) {
            const char *scales = weight + v / VECS * job->panel_bytes + job->planes[0] + v % VECS * LANES * 4;
            vec scale = load((const float *)scales) * spread(head.scale);
            ivec exact = (ivec)(sums[r * panels * VECS + v] - spread_word(head.offset));
            put(job, row + r, column + v * LANES, rounded(__builtin_convertvector(exact, vec) * scale));
        }
    }
}

INLINE void int8_tile(const int rows, const int panels, const struct linear *job, long row, const char *weight, long column,
                      struct soon soon) {
    word sum[TILE][2 * VECS];
    const char *x = job->x + row * job->x_step;
    long words = int8_words(job->inputs);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) sum[r][v] = (word){0};
    for (long k = 0; k < words; k++) {
        word some[2 * VECS];
        ask_ahead(panels, weight, k, soon);
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++)
            some[v] = load_words(weight + (v / VECS) * job->panel_bytes + (k * PANEL + (v % VECS) * LANES) * 4);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            dot_words(panels * VECS, some, x + r * job->x_step + LINE + k * 4 * CODE_BYTES, sum[r]);
    }
    word done[TILE * 2 * VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) done[r * panels * VECS + v] = sum[r][v];
    put_scaled(job, row, rows, weight, column, panels, done);
}

TILES(int8_tile)
static const struct format int8_format = {
    SINGLE(int8_tile), TWICE(int8_tile), TILE_INT8, .bits = 8, .whole = 4, .planes = {{4, 0}}, /* scales */
};

#endif
