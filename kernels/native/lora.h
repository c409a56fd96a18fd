/* Adapters (LoRA): low-rank matrices a and b of a layer, kept in slots. To a row with slot s, and to the outputs of part p, is added
 *
 *     (x a[s][p]^T) b[s][.., outputs of p]
 *
 * in two steps, in float32. Before the layer's product `shrink` multiplies rows by a; behind it `add_adapters` multiplies that by b,
 * where a task has just computed the same outputs. A sum of the first step has 16 chains of fused multiply-adds whatever the width
 * of vectors, one of the second is one chain over the ranks: they depend on the row and its slot alone. Rows without a slot are not
 * touched.
 */
#ifndef DIPTYCH_LORA_H
#define DIPTYCH_LORA_H

#include "bfloat.h"
#include "grouped.h"

#define LORA_PARTS 3
#define LORA_ROWS 8                     /* of a task of shrink */
#define LORA_RANKS (LANES == 16 ? 8 : 4) /* that share the loads of x */
#define LORA_VECS 4                     /* of outputs that share the loads of what shrink left */

/* ranks: those in use, of each slot and part; what lies behind them is not read. ends: of each part's outputs. Elements are
 * bfloat16 or float32. */
struct lora {
    const char *a, *b; /* [slots][parts][max_rank][inputs], [slots][max_rank][outputs] */
    const int32_t *ranks;
    int64_t bfloats, parts, max_rank, outputs, ends[LORA_PARTS];
};

INLINE long lora_bytes(const struct lora *lora) { return lora->bfloats ? 2 : 4; }
INLINE vec load_lora(const int bfloats, const char *from) {
    return bfloats ? load_bfloats((const uint16_t *)from) : load((const float *)from);
}

/* Rows that meet a layer's weights.
 *
 * prepared  room for them as the layer's format reads them
 * slots     of each row, -1: none; NULL: no row has one
 * shrunk    [rows][parts * max_rank]
 */
struct rows {
    const float *x;
    char *prepared;
    const int32_t *slots;
    float *shrunk;
    long count, inputs;
    int threads;
};

/* to[r] = x a[r]^T. `a`: [ranks][inputs] */
INLINE void shrink_row(const int bfloats, const int ranks, const float *x, const char *a, long inputs, float *to) {
    vec sum[LORA_RANKS][SUM_LANES / LANES];
    const long bytes = bfloats ? 2 : 4, step = inputs * bytes, whole = inputs - inputs % SUM_LANES;
#pragma GCC unroll 8
    for (int r = 0; r < ranks; r++)
#pragma GCC unroll 4
        for (int i = 0; i < SUM_LANES / LANES; i++) sum[r][i] = (vec){0};
    for (long k = 0; k < whole; k += SUM_LANES)
#pragma GCC unroll 4
        for (int i = 0; i < SUM_LANES / LANES; i++) {
            vec some = load(x + k + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ranks; r++) sum[r][i] += some * load_lora(bfloats, a + r * step + (k + i * LANES) * bytes);
        }
    if (whole < inputs) {
        float rest[SUM_LANES] = {0}, factors[SUM_LANES] = {0}; /* of either type: zeros are zeros */
        memcpy(rest, x + whole, (inputs - whole) * sizeof(float));
        for (int r = 0; r < ranks; r++) {
            memcpy(factors, a + r * step + whole * bytes, (inputs - whole) * bytes);
            for (int i = 0; i < SUM_LANES / LANES; i++)
                sum[r][i] += load(rest + i * LANES) * load_lora(bfloats, (const char *)factors + i * LANES * bytes);
        }
    }
    for (int r = 0; r < ranks; r++) {
        float part[SUM_LANES];
        memcpy(part, sum[r], sizeof part);
        for (int half = SUM_LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++) part[i] += part[i + half];
        to[r] = part[0];
    }
}

/* y[v] += t b[.., v], vectors of outputs `step` bytes apart in b from one rank to the next. */
INLINE void expand_row(const int bfloats, const int vectors, const float *t, long rank, const char *b, long step, float *y) {
    vec sum[LORA_VECS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[v] = (vec){0};
    for (long k = 0; k < rank; k++) {
        vec factor = spread(t[k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[v] += factor * load_lora(bfloats, b + k * step + v * LANES * (bfloats ? 2 : 4));
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store(y + v * LANES, load(y + v * LANES) + sum[v]);
}

typedef void (*shrink_function)(const float *x, const char *a, long inputs, float *to);
typedef void (*expand_function)(const float *t, long rank, const char *b, long step, float *y);
#define LORA_OF(KIND, BFLOATS) \
    static void shrink_##KIND##_one(const float *x, const char *a, long inputs, float *to) { \
        shrink_row(BFLOATS, 1, x, a, inputs, to); \
    } \
    static void shrink_##KIND##_some(const float *x, const char *a, long inputs, float *to) { \
        shrink_row(BFLOATS, LORA_RANKS, x, a, inputs, to); \
    } \
    static void expand_##KIND##_one(const float *t, long rank, const char *b, long step, float *y) { \
        expand_row(BFLOATS, 1, t, rank, b, step, y); \
    } \
    static void expand_##KIND##_some(const float *t, long rank, const char *b, long step, float *y) { \
        expand_row(BFLOATS, LORA_VECS, t, rank, b, step, y); \
    }
LORA_OF(floats, 0)
LORA_OF(bfloats, 1)
static const shrink_function shrink_of[2][2] = {{shrink_floats_one, shrink_floats_some}, {shrink_bfloats_one, shrink_bfloats_some}};
static const expand_function expand_of[2][2] = {{expand_floats_one, expand_floats_some}, {expand_bfloats_one, expand_bfloats_some}};

/* The end of the rows from `row` on that have the same slot. */
INLINE long same_slot(const int32_t *slots, long row, long last) {
    long end = row + 1;
    while (end < last && slots[end] == slots[row]) end++;
    return end;
}

struct shrink {
    const struct lora *lora;
    const struct rows *rows;
};

/* Some rows and a part. Rows that have the same slot meet some ranks of it one after the other, while these are in the cache. */
static void shrink_task(const void *context, long task, int thread) {
    const struct shrink *job = context;
    const struct lora *lora = job->lora;
    const struct rows *rows = job->rows;
    long part = task % lora->parts, first = task / lora->parts * LORA_ROWS, last = min_long(rows->count, first + LORA_ROWS);
    long row_bytes = rows->inputs * lora_bytes(lora), width = lora->parts * lora->max_rank;
    (void)thread;
    for (long row = first, next; row < last; row = next) {
        next = same_slot(rows->slots, row, last);
        if (rows->slots[row] < 0) continue;
        long place = rows->slots[row] * lora->parts + part, rank = lora->ranks[place];
        for (long r = 0, some; r < rank; r += some) {
            some = r + LORA_RANKS <= rank ? LORA_RANKS : 1;
            const char *a = lora->a + (place * lora->max_rank + r) * row_bytes;
            for (long at = row; at < next; at++)
                shrink_of[lora->bfloats][some > 1](rows->x + at * rows->inputs, a, rows->inputs,
                                                   rows->shrunk + at * width + part * lora->max_rank + r);
        }
    }
}

static void shrink(const struct lora *lora, const struct rows *rows) {
    struct shrink job = {lora, rows};
    run_tasks(shrink_task, &job, ceil_div(rows->count, LORA_ROWS) * lora->parts, rows->threads);
}

/* To the outputs of a share, which is computed. */
static void add_adapters(const struct linear *job, struct share share) {
    const struct lora *lora = job->lora;
    if (!lora) return;
    long begin = job->lora_column + share.p * PANEL, end = job->lora_column + min_long(job->outputs, share.end * PANEL);
    long bytes = lora_bytes(lora), step = lora->outputs * bytes, width = lora->parts * lora->max_rank;
    for (long row = share.first; row < share.last; row++) {
        long slot = job->slots[row];
        if (slot < 0) continue;
        for (long part = 0, from = begin; part < lora->parts && from < end; part++) {
            long to = min_long(end, lora->ends[part]), rank = lora->ranks[slot * lora->parts + part];
            const float *t = job->shrunk + row * width + part * lora->max_rank;
            for (long some; rank && from < to; from += some * LANES) {
                some = from + LORA_VECS * LANES <= to ? LORA_VECS : 1;
                expand_of[lora->bfloats][some > 1](t, rank, lora->b + slot * lora->max_rank * step + from * bytes, step,
                                                   job->y + row * job->y_step + from - job->lora_column);
            }
            from = max_long(from, to);
        }
    }
}

#endif
