/* bfloat16 weights and activations: a row is rounded before it meets the weights, and products are added up in float32.
 *
 * Inputs come in blocks of 32, and a block has two chains of fused multiply-adds that begin with zero, one over its even inputs and
 * one over its odd ones. A result is
 *
 *     (even + odd of block 0) + (even + odd of block 1) + ...
 *
 * with numbers below the normal ones as zeros. This is the order of AMX's TDPBF16PS, which takes a block at a time. Vectors follow it
 * bit for bit, so that tiles may be used or not, and every number of rows has the same sums. (VDPBF16PS has another order: see
 * docs/decisions/bf16-on-cpus.md.)
 *
 * Two inputs of an output are one word of a panel, the even one in its low half: a block of a panel is [16][PANEL] words, and a block
 * of a row 16 words, a cache line.
 */
#ifndef DIPTYCH_BF16_H
#define DIPTYCH_BF16_H

#include "bfloat.h"
#include "int8.h"

#define BLOCK_INPUTS 32
#define BLOCK_WORDS 16
#define BLOCK_BYTES (BLOCK_WORDS * PANEL * 4) /* of a panel */
#define BF16_ROWS (LANES == 16 ? 6 : 2)       /* of one pass of vectors: two chains for every sum fill the register file */

INLINE long num_blocks(long inputs) { return ceil_div(inputs, BLOCK_INPUTS); }

/* An odd number of lines: the rows of a tile would else share a few sets of the cache. */
INLINE long bf16_row_bytes(long inputs) { return (num_blocks(inputs) | 1) * LINE; }

static void round_row(const float *x, long inputs, char *to) {
    long whole = inputs - inputs % LANES;
    for (long k = 0; k < whole; k += LANES) store_bfloats((uint16_t *)to + k, load(x + k));
    if (whole < inputs) {
        float part[LANES] = {0};
        uint16_t rest[LANES];
        memcpy(part, x + whole, (inputs - whole) * sizeof(float));
        store_bfloats(rest, load(part));
        memcpy(to + 2 * whole, rest, 2 * (inputs - whole));
    }
    memset(to + 2 * inputs, 0, num_blocks(inputs) * LINE - 2 * inputs);
}

/* ---- by vectors ---- */

INLINE unsigned flush_tiny(void) {
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* results, and operands */
    return before;
#else
    return 0;
#endif
}

INLINE void flush_as_before(unsigned before) {
#if defined(__SSE__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

INLINE void add_blocks(const int rows, const struct linear *job, const char *x, const char *weight, vec *sums) {
    const word high = spread_word(0xffff0000);
    for (long b = 0; b < num_blocks(job->inputs); b++) {
        vec even[BF16_ROWS][VECS], odd[BF16_ROWS][VECS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) even[r][v] = odd[r][v] = (vec){0};
        for (long k = 0; k < BLOCK_WORDS; k++) {
            vec low_weight[VECS], high_weight[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) {
                word w = load_words(weight + b * BLOCK_BYTES + (k * PANEL + v * LANES) * 4);
                low_weight[v] = (vec)(w << 16), high_weight[v] = (vec)(w & high);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                word pair = spread_word(word_at(x + r * job->x_step + b * LINE + k * 4));
                vec low_x = (vec)(pair << 16), high_x = (vec)(pair & high);
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++) even[r][v] += low_x * low_weight[v], odd[r][v] += high_x * high_weight[v];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[r * VECS + v] += even[r][v] + odd[r][v];
    }
}

/* Not inlined: what it computes stays between the calls that change how tiny numbers are treated. */
#define ADD_BLOCKS(R) \
    static __attribute__((noinline)) void add_blocks_##R(const struct linear *job, const char *x, const char *weight, vec *sums) { \
        add_blocks(R, job, x, weight, sums); \
    }
ADD_BLOCKS(1) ADD_BLOCKS(2)
#if LANES == 16
ADD_BLOCKS(3) ADD_BLOCKS(4) ADD_BLOCKS(5) ADD_BLOCKS(6)
#endif
#undef ADD_BLOCKS
static void (*const add_blocks_of[])(const struct linear *, const char *, const char *, vec *) = {
    0, add_blocks_1, add_blocks_2,
#if LANES == 16
    add_blocks_3, add_blocks_4, add_blocks_5, add_blocks_6,
#endif
};

static void bf16_vectors(const struct linear *job, long first, long last, long p, long end) {
    long tiles = ceil_div(last - first, BF16_ROWS);
    for (; p < end; p++) {
        const char *weight = job->weight + p * job->panel_bytes;
        for (long t = 0, row = first, rows; t < tiles; t++, row += rows) {
            vec sums[BF16_ROWS * VECS] = {{0}};
            rows = (last - row) / (tiles - t);
            unsigned before = flush_tiny();
            add_blocks_of[rows](job, job->x + row * job->x_step, weight, sums);
            flush_as_before(before);
            put_rows(job, row, rows, p * PANEL, VECS, sums);
        }
    }
}

/* ---- by AMX's tiles ---- */

#if LANES == 16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAVE_TILES
#include <sys/syscall.h>

#define TILE_ROWS 16
#define ASK_FOR_STATE 0x1023 /* of arch_prctl */
#define TILE_DATA 18
#define BLOCKS_AHEAD 4 /* of weights, asked for early */

static int tiles_wanted;

/* The kernel keeps tiles for a process that has asked for it, in all of its threads. */
static int tiles_allowed(void) { return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0; }

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Sums 0 .. 3; rows 4, and `second` ones in 5; weights in 6 and 7, and in 5 where there are no second rows. */
static void shape_tiles(long rows, long second) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.row_bytes[t] = LINE;
        shapes.rows[t] = t == 4 || t < 2 ? rows : second && (t < 4 || t == 5) ? second : t < 4 ? rows : BLOCK_WORDS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

INLINE void ask_for_weights(const char *weight) {
#pragma GCC unroll 32
    for (int at = 0; at < BLOCK_BYTES; at += LINE) __builtin_prefetch(weight + at);
}

/* Up to 32 rows and one panel. */
static void two_by_one(const struct linear *job, long row, long rows, const char *weight, long column) {
    float sums[2 * TILE_ROWS][PANEL] __attribute__((aligned(LINE)));
    const char *x = job->x + row * job->x_step, *below = x + TILE_ROWS * job->x_step;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long b = 0; b < num_blocks(job->inputs); b++, x += LINE, below += LINE, weight += BLOCK_BYTES) {
        _tile_loadd(6, weight, PANEL * 4);
        _tile_loadd(4, x, job->x_step);
        _tile_loadd(7, weight + LINE, PANEL * 4);
        _tile_loadd(5, below, job->x_step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], PANEL * 4);
    _tile_stored(1, sums[0] + LANES, PANEL * 4);
    _tile_stored(2, sums[TILE_ROWS], PANEL * 4);
    _tile_stored(3, sums[TILE_ROWS] + LANES, PANEL * 4);
    put_rows(job, row, rows, column, VECS, (const vec *)sums);
}

/* Up to 16 rows and two panels. */
static void one_by_two(const struct linear *job, long row, long rows, const char *weight, long column) {
    float sums[2][TILE_ROWS][PANEL] __attribute__((aligned(LINE)));
    const char *x = job->x + row * job->x_step, *other = weight + job->panel_bytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long b = 0; b < num_blocks(job->inputs); b++, x += LINE, weight += BLOCK_BYTES, other += BLOCK_BYTES) {
        ask_for_weights(weight + BLOCKS_AHEAD * BLOCK_BYTES), ask_for_weights(other + BLOCKS_AHEAD * BLOCK_BYTES);
        _tile_loadd(4, x, job->x_step);
        _tile_loadd(6, weight, PANEL * 4);
        _tile_loadd(7, weight + LINE, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, other, PANEL * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, other + LINE, PANEL * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums[0][0], PANEL * 4);
    _tile_stored(1, sums[0][0] + LANES, PANEL * 4);
    _tile_stored(2, sums[1][0], PANEL * 4);
    _tile_stored(3, sums[1][0] + LANES, PANEL * 4);
    put_rows(job, row, rows, column, VECS, (const vec *)sums[0]);
    put_rows(job, row, rows, column + PANEL, VECS, (const vec *)sums[1]);
}

/* Up to 16 rows and one panel. */
static void one_by_one(const struct linear *job, long row, long rows, const char *weight, long column) {
    float sums[TILE_ROWS][PANEL] __attribute__((aligned(LINE)));
    const char *x = job->x + row * job->x_step;
    _tile_zero(0);
    _tile_zero(1);
    for (long b = 0; b < num_blocks(job->inputs); b++, x += LINE, weight += BLOCK_BYTES) {
        _tile_loadd(4, x, job->x_step);
        _tile_loadd(6, weight, PANEL * 4);
        _tile_loadd(7, weight + LINE, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums[0], PANEL * 4);
    _tile_stored(1, sums[0] + LANES, PANEL * 4);
    put_rows(job, row, rows, column, VECS, (const vec *)sums);
}

static void bf16_tiles(const struct linear *job, long first, long last, long p, long end) {
    long rest = (last - first) % (2 * TILE_ROWS), whole = last - rest, second = max_long(0, rest - TILE_ROWS);
    if (first < whole) shape_tiles(TILE_ROWS, TILE_ROWS);
    for (long at = p; first < whole && at < end; at++)
        for (long row = first; row < whole; row += 2 * TILE_ROWS)
            two_by_one(job, row, 2 * TILE_ROWS, job->weight + at * job->panel_bytes, at * PANEL);
    if (rest) shape_tiles(rest - second, second);
    while (rest && p < end) {
        int pair = !second && p + 1 < end;
        (pair ? one_by_two : second ? two_by_one : one_by_one)(job, whole, rest, job->weight + p * job->panel_bytes, p * PANEL);
        p += 1 + pair;
    }
    _tile_release();
}
#endif

static void bf16_rows(const struct linear *job, long first, long last, long p, long end) {
#if defined(HAVE_TILES)
    if (tiles_wanted) {
        bf16_tiles(job, first, last, p, end);
        return;
    }
#endif
    bf16_vectors(job, first, last, p, end);
}

static const struct format bf16_format = {.rows = bf16_rows, .bits = 16, .whole = BLOCK_INPUTS};

/* Returns: whether tiles are used from now on. Not during a step. */
static int use_tiles(int wanted) {
#if defined(HAVE_TILES)
    tiles_wanted = wanted && tiles_allowed();
    return tiles_wanted;
#else
    (void)wanted;
    return 0;
#endif
}

#endif
