/* float32 weights whose values bfloat16 holds, kept in it: half the bytes are read, and the bits are those of matmul.h, one chain of
 * multiply-adds over all inputs.
 *
 * Two inputs are one word of a lane. A few rows widen words as they meet them; more than NARROW_FEW share a stretch of weights that
 * was widened once.
 */
#ifndef DIPTYCH_NARROW_H
#define DIPTYCH_NARROW_H

#include "int8.h"

#define NARROW_STRETCH 128
#define NARROW_ROWS 96 /* that share what was widened */
#define NARROW_FEW 3
#define NARROW_EARLY 8192 /* bytes of weights that are asked for before a few rows meet them */

/* bfloat16 as floats: input k + i of the words of two. */
INLINE vec widened(word w, const int i) { return (vec)(i ? w & spread_word(0xffff0000) : w << 16); }

INLINE const char *narrow_words(const char *panel, long k, const int v) { return panel + (k / 2 * PANEL + v * LANES) * 4; }

INLINE void narrow_tile(const int rows, const int panels, const struct linear *job, long row, const char *weight, long column,
                        struct soon soon) {
    vec sum[TILE][2 * VECS], done[TILE * 2 * VECS];
    long x_step = job->x_step / 4;
    const float *x = (const float *)job->x + row * x_step;
    (void)soon;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) sum[r][v] = (vec){0};
    for (long k = 0; k < job->inputs; k += 2) {
        word words[2 * VECS];
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) words[v] = load_words(narrow_words(weight + v / VECS * job->panel_bytes, k, v % VECS));
        for (int panel = 0; panel < panels; panel++)
            for (long at = 0; at < PANEL * 4; at += LINE)
                __builtin_prefetch(weight + panel * job->panel_bytes + k / 2 * PANEL * 4 + at + NARROW_EARLY);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            vec wide[2 * VECS];
#pragma GCC unroll 8
            for (int v = 0; v < panels * VECS; v++) wide[v] = widened(words[v], i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vec value = spread(x[r * x_step + k + i]);
#pragma GCC unroll 8
                for (int v = 0; v < panels * VECS; v++) sum[r][v] += value * wide[v];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) done[r * panels * VECS + v] = sum[r][v];
    put_rows(job, row, rows, column, panels * VECS, done);
}
ONE_TILE(narrow_tile, 1, 1) ONE_TILE(narrow_tile, 2, 1) ONE_TILE(narrow_tile, 3, 1)
ONE_TILE(narrow_tile, 1, 2) ONE_TILE(narrow_tile, 2, 2) ONE_TILE(narrow_tile, 3, 2)
static const tile_function narrow_few[2][NARROW_FEW + 1] = {
    {0, narrow_tile_1_1, narrow_tile_2_1, narrow_tile_3_1}, {0, narrow_tile_1_2, narrow_tile_2_2, narrow_tile_3_2},
};

/* Rows over `count` inputs from `k` on, whose weights are at `wide`; `next`: what is read next, of which some is asked for beside every
 * input, or NULL. */
INLINE void wide_rows(const int rows, const struct linear *job, long row, long k, long count, const float *wide, const char *next, vec *sums) {
    long x_step = job->x_step / 4;
    const float *x = (const float *)job->x + row * x_step + k;
    vec sum[TILE][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = sums[r * VECS + v];
    for (long i = 0; i < count; i++) {
        vec some[VECS];
        if (next) __builtin_prefetch(next + i * PANEL * 2, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) some[v] = load(wide + i * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec value = spread(x[r * x_step + i]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] += value * some[v];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r * VECS + v] = sum[r][v];
}
#define WIDE_ROWS(R) \
    static void wide_##R(const struct linear *job, long row, long k, long count, const float *wide, const char *next, vec *sums) { \
        wide_rows(R, job, row, k, count, wide, next, sums); \
    }
#define WIDE_OF(R) wide_##R,
EACH_COUNT(WIDE_ROWS)
static void (*const wide_of[])(const struct linear *, long, long, long, const float *, const char *, vec *) = {0, EACH_COUNT(WIDE_OF)};

static void narrow_panel(const struct linear *job, long first, long rows, long p) {
    float wide[NARROW_STRETCH * PANEL] __attribute__((aligned(LINE)));
    vec sums[NARROW_ROWS * VECS];
    const char *weight = job->weight + p * job->panel_bytes;
    long tiles = ceil_div(rows, TILE);
    memset(sums, 0, rows * VECS * sizeof(vec));
    for (long k = 0; k < job->inputs; k += NARROW_STRETCH) {
        long count = min_long(NARROW_STRETCH, job->inputs - k);
        for (long i = 0; i < count; i += 2)
            for (int v = 0; v < VECS; v++) {
                word words = load_words(narrow_words(weight, k + i, v));
                store(wide + i * PANEL + v * LANES, widened(words, 0));
                store(wide + (i + 1) * PANEL + v * LANES, widened(words, 1));
            }
        const char *next = narrow_words(weight, k + count, 0);
        for (long t = 0, at = 0; t < tiles; t++, next = 0) {
            long some = (rows - at) / (tiles - t);
            wide_of[some](job, first + at, k, count, wide, next, sums + at * VECS);
            at += some;
        }
    }
    put_rows(job, first, rows, p * PANEL, VECS, sums);
}

static void narrow_rows(const struct linear *job, long first, long last, long p, long end) {
    const struct soon none = {0};
    while (p < end) {
        int pair = last - first <= NARROW_FEW && p + 1 < end;
        if (last - first <= NARROW_FEW) narrow_few[pair][last - first](job, first, job->weight + p * job->panel_bytes, p * PANEL, none);
        else
            for (long at = first; at < last; at += NARROW_ROWS) narrow_panel(job, at, min_long(NARROW_ROWS, last - at), p);
        p += 1 + pair;
    }
}

static const struct format narrow_format = {.rows = narrow_rows, .bits = 16, .whole = 2};

#endif
