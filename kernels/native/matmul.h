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
#define ROWS_STEP 32            /* of a format with tiles of its own: parts begin at multiples of it, at multiples of TILE else */
#define AHEAD 128               /* inputs whose weights are asked for early */

/* Memory that is wanted soon, or none: so many bytes of it are asked for beside every input. */
struct soon {
    const char *from;
    long step;
};

struct linear;

/* One tile: some rows from `row` on by one or two panels, the first of which is at `weight` and begins with output `column`. */
typedef void (*tile_function)(const struct linear *job, long row, const char *weight, long column, struct soon soon);

#define MAX_PLANES 4

/* How weights are kept, and which tiles go over them. A panel has the codes of its inputs, and behind them the planes.
 *
 * single    by the number of rows, with one panel; twice: up to 3 rows, with two. height: rows of a tile at most
 * rows      computes rows [first, last) against panels [p, end), where the format has tiles of its own
 * grouped   see grouped.h
 * bits      of an input; it is kept in whole groups of `whole` inputs
 * planes    scales and the like: bytes of one, and the inputs that share it; 0 for all, or GROUP for those of a group
 */
struct format {
    tile_function single[TILE + 1], twice[4];
    long height;
    const struct grouped *grouped;
    void (*rows)(const struct linear *job, long first, long last, long p, long end);
    long bits, whole;
    struct plane {
        long bytes, inputs;
    } planes[MAX_PLANES];
};
#define GROUP (-1)

/* x: the rows as the format reads them, x_step bytes apart. group: inputs that share a scale, where the format has groups.
 * planes: where they begin in a panel, in bytes. lora, or NULL, with teams, shrunk and the place of output 0 in lora's: see lora.h. */
struct linear {
    const struct format *format;
    const char *x, *weight;
    const float *bias;
    float *y;
    long rows, inputs, outputs, group, x_step, y_step, panel_bytes, planes[MAX_PLANES];
    int add;
    const struct lora *lora;
    const struct team *teams;
    const float *shrunk;
    long num_teams, lora_column;
};

#define LINE 64 /* bytes; rows and panels begin at one */
INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long whole_lines(long bytes) { return ceil_div(bytes, LINE) * LINE; }
INLINE long plane_size(const struct plane *plane, long inputs, long group) {
    return plane->inputs ? inputs / (plane->inputs == GROUP ? group : plane->inputs) : 1;
}

/* Bytes of a panel. planes: where they begin. */
static long lay_out_panel(const struct format *format, long inputs, long group, long planes[MAX_PLANES]) {
    long bytes = ceil_div(inputs, format->whole) * format->whole * PANEL * format->bits / 8;
    for (int i = 0; i < MAX_PLANES; i++) {
        planes[i] = bytes;
        bytes += plane_size(&format->planes[i], inputs, group) * PANEL * format->planes[i].bytes;
    }
    return whole_lines(bytes);
}

/* Write a vector of a row; columns from `outputs` on are not written. */
INLINE void put(const struct linear *job, long row, long column, vec value) {
    float *out = job->y + row * job->y_step + column;
    const float *bias = job->bias ? job->bias + column : 0;
    long valid = job->outputs - column;
    if (LANES <= valid) {
        if (bias) value += load(bias);
        if (job->add) value += load(out);
        store(out, value);
    } else {
        float part[LANES];
        store(part, value);
        for (long i = 0; i < valid && i < LANES; i++) {
            float one = part[i];
            if (bias) one += bias[i];
            if (job->add) one += out[i];
            out[i] = one;
        }
    }
}

/* Write a tile's sums, `vectors` of each row. Not inlined: it is the same code for every tile. */
static __attribute__((noinline)) void put_rows(const struct linear *job, long row, long rows, long column, long vectors,
                                               const vec *sums) {
    for (long r = 0; r < rows; r++)
        for (long v = 0; v < vectors; v++) put(job, row + r, column + v * LANES, sums[r * vectors + v]);
}

/* Beside step k over a panel: the panel's own weights a little later, and what is wanted soon. With so few rows that panels go in
 * pairs the hardware alone does better. */
INLINE void ask_ahead(const int panels, const char *weight, long k, struct soon soon) {
    if (panels != 1) return;
    for (int at = 0; at < PANEL * 4; at += 64) __builtin_prefetch(weight + (k + AHEAD) * PANEL * 4 + at);
    if (soon.from) __builtin_prefetch(soon.from + k * soon.step, 0, 2); /* no further than the second-level cache */
}

INLINE void tile(const int rows, const int panels, const struct linear *job, long row, const char *weight, long column,
                 struct soon soon) {
    vec sum[TILE][2 * VECS];
    const float *x = (const float *)job->x + row * (job->x_step / 4), *w = (const float *)weight;
    long x_step = job->x_step / 4, panel_step = job->panel_bytes / 4;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) sum[r][v] = (vec){0};
    for (long k = 0; k < job->inputs; k++) {
        vec some[2 * VECS];
        ask_ahead(panels, weight, k, soon);
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) some[v] = load(w + k * PANEL + (v / VECS) * panel_step + (v % VECS) * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec value = spread(x[r * x_step + k]);
#pragma GCC unroll 8
            for (int v = 0; v < panels * VECS; v++) sum[r][v] += value * some[v];
        }
    }
    vec done[TILE * 2 * VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < panels * VECS; v++) done[r * panels * VECS + v] = sum[r][v];
    put_rows(job, row, rows, column, panels * VECS, done);
}

/* TILES(KIND): functions KIND_rows_panels of KIND(rows, panels, ...), and the initializers of a format's tables. */
#define ONE_TILE(KIND, R, P) \
    static void KIND##_##R##_##P(const struct linear *job, long row, const char *weight, long column, struct soon soon) { \
        KIND(R, P, job, row, weight, column, soon); \
    }
#define FEW_TILES(KIND) \
    ONE_TILE(KIND, 1, 1) ONE_TILE(KIND, 1, 2) ONE_TILE(KIND, 2, 1) ONE_TILE(KIND, 2, 2) ONE_TILE(KIND, 3, 1) \
    ONE_TILE(KIND, 3, 2) ONE_TILE(KIND, 4, 1)
#define FEW_SINGLE(KIND) 0, KIND##_1_1, KIND##_2_1, KIND##_3_1, KIND##_4_1
#define TWICE(KIND) {0, KIND##_1_2, KIND##_2_2, KIND##_3_2}
#if TILE >= 12
#define TILES(KIND) \
    FEW_TILES(KIND) ONE_TILE(KIND, 5, 1) ONE_TILE(KIND, 6, 1) ONE_TILE(KIND, 7, 1) ONE_TILE(KIND, 8, 1) \
    ONE_TILE(KIND, 9, 1) ONE_TILE(KIND, 10, 1) ONE_TILE(KIND, 11, 1) ONE_TILE(KIND, 12, 1)
#define SINGLE(KIND) \
    {FEW_SINGLE(KIND), KIND##_5_1, KIND##_6_1, KIND##_7_1, KIND##_8_1, KIND##_9_1, KIND##_10_1, KIND##_11_1, KIND##_12_1}
#elif TILE >= 6
#define TILES(KIND) FEW_TILES(KIND) ONE_TILE(KIND, 5, 1) ONE_TILE(KIND, 6, 1)
#define SINGLE(KIND) {FEW_SINGLE(KIND), KIND##_5_1, KIND##_6_1}
#else
#define TILES(KIND) FEW_TILES(KIND) ONE_TILE(KIND, 5, 1)
#define SINGLE(KIND) {FEW_SINGLE(KIND), KIND##_5_1}
#endif

TILES(tile)
static const struct format plain_format = {SINGLE(tile), TWICE(tile), TILE, .bits = 32, .whole = 1};

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }
INLINE long num_panels(long outputs) { return ceil_div(outputs, PANEL); }
INLINE long group_panels(const struct linear *job) { return max_long(2, GROUP_BYTES / job->panel_bytes & ~1L); }

/* Rows [first, last) against panels [p, end). Tiles are of like height: 8 rows are 4 + 4, not 6 + 2. The tiles of a panel share
 * out the asking for the next one, so that memory works while they compute; behind the last one comes `then`. */
static void some_rows(const struct linear *job, long first, long last, long p, long end, const char *then) {
    if (job->format->rows) {
        job->format->rows(job, first, last, p, end);
        return;
    }
    long tiles = ceil_div(last - first, job->format->height), bytes = job->panel_bytes;
    while (p < end) {
        int pair = last - first <= 3 && p + 1 < end;
        long at = first;
        const char *weight = job->weight + p * bytes, *next = p + 1 < end ? weight + bytes : then;
        for (long t = 0; t < tiles; t++) {
            long rows = (last - at) / (tiles - t);
            struct soon soon = {tiles > 1 ? next + bytes * t / tiles : 0, ceil_div(PANEL * 4, tiles)};
            (pair ? job->format->twice : job->format->single)[rows](job, at, weight, p * PANEL, soon);
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
    return ceil_div(num_panels(job->outputs), group_panels(job)) * row_parts(job->rows);
}

INLINE long row_step(const struct linear *job) { return job->format->rows ? ROWS_STEP : TILE; }

INLINE struct share share_of(const struct linear *job, long task) {
    long parts = row_parts(job->rows), part = task % parts, step = row_step(job);
    long tiles = ceil_div(job->rows, step), group = group_panels(job);
    long p = task / parts * group;
    return (struct share){
        .first = tiles * part / parts * step,
        .last = min_long(job->rows, tiles * (part + 1) / parts * step),
        .p = p,
        .end = min_long(num_panels(job->outputs), p + group),
    };
}

/* then: what is read behind these panels. */
static void linear_share(const struct linear *job, struct share share, const char *then) {
    long step = row_step(job), block = max_long(step, ROWS_BYTES / job->x_step / step * step);
    const char *again = job->weight + share.p * job->panel_bytes;
    if (share.last < job->rows) then = again;
    for (long first = share.first; first < share.last; first += block)
        some_rows(job, first, min_long(share.last, first + block), share.p, share.end, first + block < share.last ? again : then);
}

static void add_adapters(const struct linear *job, struct share share);

static void linear_task(const void *context, long task, int thread) {
    (void)thread;
    const struct linear *job = context;
    struct share share = share_of(job, task);
    linear_share(job, share, job->weight + share.end * job->panel_bytes); /* the matrices of a layer lie one behind the other */
    add_adapters(job, share);
}

static void linear_run(const struct linear *job, int num_threads) {
    if (job->rows > 0) run_tasks(linear_task, job, num_shares(job), num_threads);
}

#endif
