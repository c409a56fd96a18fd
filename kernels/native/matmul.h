/* y = x W^T + bias (+ y), W packed into panels: panel p holds outputs [p * PANEL, (p + 1) * PANEL) as [inputs][PANEL].
 *
 * Every output is one chain of fused multiply-adds over the inputs in their order, whatever the number of rows, of threads or
 * the place of the row: a row's result does not depend on its neighbours, bit for bit.
 */
#ifndef DIPTYCH_MATMUL_H
#define DIPTYCH_MATMUL_H

#include "threads.h"
#include "vectors.h"

#define ROWS_BYTES (200 << 10)  /* of x that are kept in the second-level cache */
#define GROUP_BYTES (160 << 10) /* of packed weights of one task */
#define PART_ROWS 72            /* of a task at least, where there are as many */
#define MAX_PARTS 16
#define AHEAD 128               /* inputs whose weights are asked for early */

/* Memory that is wanted soon, or none: so many bytes of it are asked for beside every input. */
struct soon {
    const char *from;
    long step;
};

/* One tile: `rows` rows (a constant after inlining) by `panels` panels that lie `panel_step` apart; step: distance of two inputs'
 * weights. Columns of y from `valid` on are not written. */
INLINE void tile(const int rows, const int panels, const float *x, long x_step, const float *w, long step, long panel_step,
                 long inputs, float *y, long y_step, const float *bias, int add, long valid, struct soon soon) {
    vec sum[TILE][2 * VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) sum[r][v] = (vec){0};
    for (long k = 0; k < inputs; k++) {
        vec weight[2 * VECS];
        if (panels == 1) { /* with so few rows that panels go in pairs the hardware alone does better */
            for (int at = 0; at < PANEL; at += 16) __builtin_prefetch(w + (k + AHEAD) * step + at);
            if (soon.from) __builtin_prefetch(soon.from + k * soon.step, 0, 2); /* no further than the second-level cache */
        }
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++)
            weight[v] = load(w + k * step + (v / VECS) * panel_step + (v % VECS) * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec value = spread(x[r * x_step + k]);
#pragma GCC unroll 8
            for (int v = 0; v < panels * VECS; v++) sum[r][v] += value * weight[v];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *out = y + r * y_step;
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) {
            vec value = sum[r][v];
            long at = v * LANES;
            if (at + LANES <= valid) {
                if (bias) value += load(bias + at);
                if (add) value += load(out + at);
                store(out + at, value);
            } else {
                float part[LANES];
                store(part, value);
                for (long i = 0; at + i < valid && i < LANES; i++) {
                    float one = part[i];
                    if (bias) one += bias[at + i];
                    if (add) one += out[at + i];
                    out[at + i] = one;
                }
            }
        }
    }
}

#define ONE_TILE(R, P) \
    static void tile_##R##_##P(const float *x, long xs, const float *w, long s, long ps, long n, float *y, long ys, \
                               const float *bias, int add, long valid, struct soon soon) { \
        tile(R, P, x, xs, w, s, ps, n, y, ys, bias, add, valid, soon); \
    }
ONE_TILE(1, 1) ONE_TILE(1, 2) ONE_TILE(2, 1) ONE_TILE(2, 2) ONE_TILE(3, 1) ONE_TILE(3, 2)
ONE_TILE(4, 1) ONE_TILE(5, 1)
#if TILE >= 6
ONE_TILE(6, 1)
#endif
#if TILE >= 12
ONE_TILE(7, 1) ONE_TILE(8, 1) ONE_TILE(9, 1) ONE_TILE(10, 1) ONE_TILE(11, 1) ONE_TILE(12, 1)
#endif

typedef void (*tile_function)(const float *, long, const float *, long, long, long, float *, long, const float *, int, long,
                              struct soon);
static const tile_function single[] = {
    0, tile_1_1, tile_2_1, tile_3_1, tile_4_1, tile_5_1,
#if TILE >= 6
    tile_6_1,
#endif
#if TILE >= 12
    tile_7_1, tile_8_1, tile_9_1, tile_10_1, tile_11_1, tile_12_1,
#endif
};
static const tile_function twice[] = {0, tile_1_2, tile_2_2, tile_3_2};

struct linear {
    const float *x, *weight, *bias;
    float *y;
    long rows, inputs, outputs, x_step, y_step;
    int add;
};

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long num_panels(long outputs) { return ceil_div(outputs, PANEL); }
INLINE long group_panels(long inputs) { return max_long(2, GROUP_BYTES / (inputs * PANEL * 4) & ~1L); }

/* Rows [first, last) against panels [p, end). Tiles are of like height: 8 rows are 4 + 4, not 6 + 2. The tiles of a panel share
 * out the asking for the next one, so that memory works while they compute; behind the last one comes `then`. */
static void some_rows(const struct linear *job, long first, long last, long p, long end, const float *then) {
    long tiles = ceil_div(last - first, TILE), inputs = job->inputs;
    while (p < end) {
        int pair = last - first <= 3 && p + 1 < end;
        long at = first, column = p * PANEL, bytes = inputs * PANEL * 4;
        const float *weight = job->weight + p * inputs * PANEL;
        const char *next = (const char *)(p + 1 < end ? weight + inputs * PANEL : then);
        for (long t = 0; t < tiles; t++) {
            long rows = (last - at) / (tiles - t);
            struct soon soon = {tiles > 1 ? next + bytes * t / tiles : 0, ceil_div(PANEL * 4, tiles)};
            (pair ? twice : single)[rows](job->x + at * job->x_step, job->x_step, weight, PANEL, inputs * PANEL, inputs,
                                          job->y + at * job->y_step + column, job->y_step,
                                          job->bias ? job->bias + column : 0, job->add, job->outputs - column, soon);
            at += rows;
        }
        p += 1 + pair;
    }
}

/* What one task computes: rows [first, last) of panels [p, end). The parts of the rows follow each other, so that a task finds its
 * weights in the cache where the one before it had them; there are enough tasks for threads that the machine holds up for a while. */
struct share {
    long first, last, p, end;
};

INLINE long row_parts(long rows) { return max_long(1, min_long(rows / PART_ROWS, MAX_PARTS)); }

INLINE long num_shares(const struct linear *job) {
    return ceil_div(num_panels(job->outputs), group_panels(job->inputs)) * row_parts(job->rows);
}

INLINE struct share share_of(const struct linear *job, long task) {
    long parts = row_parts(job->rows), part = task % parts, tiles = ceil_div(job->rows, TILE), group = group_panels(job->inputs);
    long p = task / parts * group;
    return (struct share){
        .first = tiles * part / parts * TILE,
        .last = min_long(job->rows, tiles * (part + 1) / parts * TILE),
        .p = p,
        .end = min_long(num_panels(job->outputs), p + group),
    };
}

/* then: what is read behind these panels. */
static void linear_share(const struct linear *job, struct share share, const float *then) {
    long block = max_long(TILE, ROWS_BYTES / (job->inputs * 4) / TILE * TILE);
    const float *again = job->weight + share.p * job->inputs * PANEL;
    if (share.last < job->rows) then = again;
    for (long first = share.first; first < share.last; first += block)
        some_rows(job, first, min_long(share.last, first + block), share.p, share.end, first + block < share.last ? again : then);
}

static void linear_task(const void *context, long task, int thread) {
    (void)thread;
    const struct linear *job = context;
    struct share share = share_of(job, task);
    linear_share(job, share, job->weight + share.end * job->inputs * PANEL); /* the matrices of a layer lie one behind the other */
}

static void linear_run(const struct linear *job, int num_threads) {
    if (job->rows > 0) run_tasks(linear_task, job, num_shares(job), num_threads);
}

static void pack_panel(const float *weight, long inputs, long outputs, long p, float *out) {
    for (long k = 0; k < inputs; k++)
        for (long i = 0; i < PANEL; i++) {
            long column = p * PANEL + i;
            out[k * PANEL + i] = column < outputs ? weight[column * inputs + k] : 0.0f;
        }
}

#endif
