/* Adapters (LoRA): low-rank matrices a and b of a layer, kept in slots. To a row with slot s, and to the outputs of part p, is added
 *
 *     (x a[s][p]^T) b[s][.., outputs of p]
 *
 * in two steps, in float32. `shrink` multiplies rows by a, beside their preparation for the layer's product; behind that
 * `add_adapters` multiplies by b, where a task has just computed the same outputs. A sum of the first step is two chains of fused
 * multiply-adds, over the even and the odd inputs, one of the second is one chain over the ranks: they depend on the row and its slot
 * alone, whatever the width of vectors. Rows without a slot are not touched.
 *
 * A step reads all of its adapters and does little with them, so what counts is how they are read: a slot's matrices lie as they are
 * gone through, one vector of ranks, or of outputs, behind the other; values that bfloat16 has are kept in it; and rows with the same
 * slot, wherever they stand, meet them together.
 */
#ifndef DIPTYCH_LORA_H
#define DIPTYCH_LORA_H

#include "bfloat.h"
#include "matmul.h"

#define LORA_PARTS 3
#define LORA_ROWS 4          /* of a team */
#define LORA_AHEAD (4 << 10) /* bytes of a that are asked for early */

/* An adapter in a slot of a layer. ranks: of each part, one behind the other; 0: the part is left alone.
 *
 * a  [ranks of all parts / LANES, rounded up][inputs][LANES]
 * b  of each part: [outputs / LANES][rank][LANES]
 *
 * each of bfloat16 or float32. */
struct adapter {
    const char *a, *b;
    int32_t a_bfloats, b_bfloats, ranks[LORA_PARTS], unused;
};

/* width: floats of a row of `shrunk`. ends: of each part's outputs, multiples of LANES. */
struct lora {
    const struct adapter *slots;
    int64_t parts, width, ends[LORA_PARTS];
};

/* Up to LORA_ROWS rows that have the same slot. */
struct team {
    int32_t slot, count, rows[LORA_ROWS];
};

/* Rows that meet a layer's weights.
 *
 * prepared  room for them as the layer's format reads them
 * teams     of all rows with a slot, by slot; none: no row has one
 * shrunk    [rows][width of the layer's lora]
 */
struct rows {
    const float *x;
    char *prepared;
    const struct team *teams;
    float *shrunk;
    long count, num_teams, inputs;
    int threads;
};

INLINE vec load_lora(const int bfloats, const char *from, long index) {
    return bfloats ? load_bfloats((const uint16_t *)from + index) : load((const float *)from + index);
}

/* to[r][0 .. LANES) = x[r] a^T. `a`: [inputs][LANES] */
INLINE void shrink_rows(const int bfloats, const int rows, const float *const *x, const char *a, long inputs, float *const *to) {
    const long step = LANES * (bfloats ? 2 : 4);
    vec even[LORA_ROWS], odd[LORA_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) even[r] = odd[r] = (vec){0};
    for (long k = 0; k + 1 < inputs; k += 2) {
        vec first = load_lora(bfloats, a, k * LANES), second = load_lora(bfloats, a, (k + 1) * LANES);
        for (long at = 0; at < 2 * step; at += LINE) __builtin_prefetch(a + k * step + LORA_AHEAD + at);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            even[r] += spread(x[r][k]) * first;
            odd[r] += spread(x[r][k + 1]) * second;
        }
    }
    if (inputs % 2) {
        vec last = load_lora(bfloats, a, (inputs - 1) * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) even[r] += spread(x[r][inputs - 1]) * last;
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) store(to[r], even[r] + odd[r]);
}

/* y[r][v] += t[r] b[v], vectors of outputs. b: [vectors][rank][LANES]. soon: as much memory as b has, which is read next. */
INLINE void expand_rows(const int bfloats, const int rows, const int vectors, const float *const *t, long rank, const char *b,
                        const char *soon, float *const *y) {
    const long step = LANES * (bfloats ? 2 : 4);
    vec sum[LORA_ROWS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    for (long k = 0; k < rank; k++) {
        vec some[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            some[v] = load_lora(bfloats, b, (v * rank + k) * LANES);
            __builtin_prefetch(soon + (v * rank + k) * step);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vec factor = spread(t[r][k]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += factor * some[v];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(y[r] + v * LANES, load(y[r] + v * LANES) + sum[r][v]);
}

typedef void (*shrink_function)(const float *const *x, const char *a, long inputs, float *const *to);
typedef void (*expand_function)(const float *const *t, long rank, const char *b, const char *soon, float *const *y);
#define LORA_OF(KIND, BFLOATS, ROWS) \
    static void shrink_##KIND##_##ROWS(const float *const *x, const char *a, long inputs, float *const *to) { \
        shrink_rows(BFLOATS, ROWS, x, a, inputs, to); \
    } \
    static void expand_##KIND##_##ROWS##_one(const float *const *t, long rank, const char *b, const char *soon, float *const *y) { \
        expand_rows(BFLOATS, ROWS, 1, t, rank, b, soon, y); \
    } \
    static void expand_##KIND##_##ROWS##_panel(const float *const *t, long rank, const char *b, const char *soon, float *const *y) { \
        expand_rows(BFLOATS, ROWS, VECS, t, rank, b, soon, y); \
    }
LORA_OF(floats, 0, 1) LORA_OF(floats, 0, 2) LORA_OF(floats, 0, 3) LORA_OF(floats, 0, 4)
LORA_OF(bfloats, 1, 1) LORA_OF(bfloats, 1, 2) LORA_OF(bfloats, 1, 3) LORA_OF(bfloats, 1, 4)
#define EXPANDS(KIND, ROWS) {expand_##KIND##_##ROWS##_one, expand_##KIND##_##ROWS##_panel}
static const shrink_function shrink_of[2][LORA_ROWS + 1] = {
    {0, shrink_floats_1, shrink_floats_2, shrink_floats_3, shrink_floats_4},
    {0, shrink_bfloats_1, shrink_bfloats_2, shrink_bfloats_3, shrink_bfloats_4},
};
static const expand_function expand_of[2][LORA_ROWS + 1][2] = {
    {{0}, EXPANDS(floats, 1), EXPANDS(floats, 2), EXPANDS(floats, 3), EXPANDS(floats, 4)},
    {{0}, EXPANDS(bfloats, 1), EXPANDS(bfloats, 2), EXPANDS(bfloats, 3), EXPANDS(bfloats, 4)},
};

INLINE long num_shrinks(const struct lora *lora, const struct rows *rows) { return rows->num_teams * (lora->width / LANES); }

/* A team and a vector of ranks. */
static void shrink(const struct lora *lora, const struct rows *rows, long task) {
    long vectors = lora->width / LANES, v = task % vectors, ranks = 0;
    const struct team *team = rows->teams + task / vectors;
    const struct adapter *adapter = lora->slots + team->slot;
    const float *x[LORA_ROWS];
    float *to[LORA_ROWS];
    for (long part = 0; part < lora->parts; part++) ranks += adapter->ranks[part];
    if (v * LANES >= ranks) return;
    for (long i = 0; i < team->count; i++) {
        x[i] = rows->x + team->rows[i] * rows->inputs;
        to[i] = rows->shrunk + team->rows[i] * lora->width + v * LANES;
    }
    const char *a = adapter->a + v * rows->inputs * LANES * (adapter->a_bfloats ? 2 : 4);
    shrink_of[adapter->a_bfloats][team->count](x, a, rows->inputs, to);
}

/* A part of a layer's outputs from output `from` on: where they begin in b, and their part's ranks. */
struct place {
    const char *b;
    long part, first_rank, rank;
};

static struct place place_of(const struct lora *lora, const struct adapter *adapter, long from) {
    long part = 0, begin = 0, ranks = 0, floats = 0;
    for (; lora->ends[part] <= from; begin = lora->ends[part++]) {
        ranks += adapter->ranks[part];
        floats += (lora->ends[part] - begin) * adapter->ranks[part];
    }
    floats += (from - begin) * adapter->ranks[part];
    return (struct place){adapter->b + floats * (adapter->b_bfloats ? 2 : 4), part, ranks, adapter->ranks[part]};
}

/* To the outputs of a share, which is computed. */
static void add_adapters(const struct linear *job, struct share share) {
    const struct lora *lora = job->lora;
    if (!lora) return;
    long begin = job->lora_column + share.p * PANEL, end = job->lora_column + min_long(job->outputs, share.end * PANEL);
    for (long i = 0; i < job->num_teams; i++) {
        const struct team *team = job->teams + i;
        const struct adapter *adapter = lora->slots + team->slot;
        const float *t[LORA_ROWS], *shrunk[LORA_ROWS];
        float *y[LORA_ROWS], *rows[LORA_ROWS];
        long count = 0;
        for (long r = 0; r < team->count; r++) {
            if (team->rows[r] < share.first || team->rows[r] >= share.last) continue;
            shrunk[count] = job->shrunk + team->rows[r] * lora->width;
            rows[count++] = job->y + team->rows[r] * job->y_step - job->lora_column;
        }
        for (long from = begin, to; count && from < end; from = to) {
            struct place place = place_of(lora, adapter, from);
            to = min_long(end, lora->ends[place.part]);
            if (!place.rank) continue;
            struct place next = place_of(lora, lora->slots + team[i + 1 < job->num_teams].slot, from);
            const char *soon = next.rank ? next.b : place.b;
            long bytes = place.rank * (adapter->b_bfloats ? 2 : 4);
            for (long r = 0; r < count; r++) t[r] = shrunk[r] + place.first_rank;
            for (long at = from, some; at < to; at += some) {
                some = at + PANEL <= to ? PANEL : LANES;
                for (long r = 0; r < count; r++) y[r] = rows[r] + at;
                expand_of[adapter->b_bfloats][count][some == PANEL](t, place.rank, place.b + (at - from) * bytes,
                                                                    soon + (at - from) * bytes, y);
            }
        }
    }
}

#endif
