/* Attention of rows that come in chunks: many neighbouring rows of one sequence go through its tokens together.
 *
 * A tile's queries (rows times the query heads of a KV head) pass over KEYS tokens at a time, whose K was transposed once for
 * all of them: scores are then made as in matmul.h, whole registers of tokens, and need no sums over lanes. They are added up in the
 * order of sum_lanes all the same (first every LANES-th dimension, then the halves, quarters, ... of these sums), so that a row
 * has the same bits here and alone in attention.h.
 */
#ifndef DIPTYCH_ATTENTION_TILE_H
#define DIPTYCH_ATTENTION_TILE_H

#include "attention.h"

#define KEYS 32            /* tokens that are packed at a time: whole panels */
#define TILE_QUERIES 96    /* of one KV head */
#define QUERY_FLOATS 6144  /* of the queries that go together: they stay in the first-level cache beside the keys */

INLINE long tile_rows(long group) { return max_long(1, TILE_QUERIES / group); }

typedef float eight __attribute__((vector_size(32)));
typedef float eight_unaligned __attribute__((vector_size(32), aligned(4), may_alias));
#ifdef __clang__
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t eight_indices __attribute__((vector_size(32)));
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (eight_indices){__VA_ARGS__})
#endif

/* to[i * step + r] = rows[r][i], i and r below 8 */
INLINE void transpose8(const float *const *rows, long at, float *to, long step) {
    eight r[8], pair[8], four[8];
    for (int i = 0; i < 8; i++) r[i] = *(const eight_unaligned *)(rows[i] + at);
    for (int i = 0; i < 8; i += 2) {
        pair[i] = SHUFFLE8(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pair[i + 1] = SHUFFLE8(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; half++) {
            four[i + 2 * half] = SHUFFLE8(pair[i + half], pair[i + 2 + half], 0, 1, 8, 9, 4, 5, 12, 13);
            four[i + 2 * half + 1] = SHUFFLE8(pair[i + half], pair[i + 2 + half], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        *(eight_unaligned *)(to + i * step) = SHUFFLE8(four[i], four[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(eight_unaligned *)(to + (i + 4) * step) = SHUFFLE8(four[i], four[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* What one task reads: KV head `head` of a sequence's tokens from `first` on. */
struct sequence {
    const struct attention *a;
    const int64_t *table;
    long head, first;
};

static const float no_key[MAX_HEAD_DIM];

/* K of token t, or V where offset is v_offset: in the pool, or decoded into `room`; zeros for what is not read. */
INLINE const float *token_at(const struct sequence *s, long t, long offset, float *room) {
    const struct attention *a = s->a;
    if (t < s->first) return no_key;
    const float *slot = a->pool + s->table[t / a->block_size] * a->block_step + offset + t % a->block_size * a->slot;
    if (a->codes == FLOATS) return slot + s->head * a->head_dim;
    decode_head(a->codes, slot, a->kv_heads, s->head, a->head_dim, room);
    return room;
}

/* K of tokens [t, t + count) as panels [dim][PANEL]; zeros behind the last one and for what is not read. */
INLINE void pack_keys(const struct sequence *s, long t, long count, float *to) {
    long dim = s->a->head_dim;
    for (long i = 0; i < KEYS; i += 8) {
        float room[8][MAX_HEAD_DIM];
        const float *rows[8];
        for (int r = 0; r < 8; r++) rows[r] = i + r < count ? token_at(s, t + i + r, 0, room[r]) : no_key;
        for (long d = 0; d < dim; d += 8) transpose8(rows, d, to + (i / PANEL * dim + d) * PANEL + i % PANEL, PANEL);
    }
}

INLINE void pack_values(const struct sequence *s, long t, long count, float *to) {
    long dim = s->a->head_dim;
    for (long i = 0; i < count; i++) {
        const float *from = token_at(s, t + i, s->a->v_offset, to + i * dim);
        if (from != to + i * dim) memcpy(to + i * dim, from, dim * sizeof(float));
    }
}

/* Every LANES-th dimension from `lane` on. */
INLINE void lane_scores(const int queries, int lane, const float *q, const float *k, long dim, vec sum[TILE][VECS]) {
#pragma GCC unroll 16
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[j][v] = (vec){0};
    for (long d = lane; d < dim; d += LANES) {
        vec key[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) key[v] = load(k + d * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int j = 0; j < queries; j++) {
            vec value = spread(q[j * dim + d]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[j][v] += value * key[v];
        }
    }
}

INLINE void add_scores(const int queries, vec sum[TILE][VECS], vec more[TILE][VECS]) {
#pragma GCC unroll 16
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[j][v] += more[j][v];
}

/* sum = lanes L, L + LANES / 4, ... of the four: (L + third) + (second + fourth) */
INLINE void four_lanes(const int queries, int lane, const float *q, const float *k, long dim, vec sum[TILE][VECS]) {
    const int step = LANES / 4;
    vec b[TILE][VECS], c[TILE][VECS];
    lane_scores(queries, lane, q, k, dim, sum);
    lane_scores(queries, lane + 2 * step, q, k, dim, b);
    add_scores(queries, sum, b);
    lane_scores(queries, lane + step, q, k, dim, b);
    lane_scores(queries, lane + 3 * step, q, k, dim, c);
    add_scores(queries, b, c);
    add_scores(queries, sum, b);
}
typedef void (*four_function)(int lane, const float *q, const float *k, long dim, vec sum[TILE][VECS]);

/* scores[j][i] = q[j] . k[i] of a panel's tokens i. four: four_lanes, compiled once for all lanes. */
INLINE void panel_scores(const int queries, four_function four, const float *q, const float *k, long dim, float *scores,
                         long step) {
    vec a[TILE][VECS];
#define FOUR(L, TO) four(L, q, k, dim, TO)
#define ADD(TO, MORE) add_scores(queries, TO, MORE)
    FOUR(0, a);
#if LANES == 16
    vec b[TILE][VECS], c[TILE][VECS];
    FOUR(2, b); ADD(a, b);
    FOUR(1, b); FOUR(3, c); ADD(b, c);
    ADD(a, b);
#elif LANES == 8
    vec b[TILE][VECS];
    FOUR(1, b); ADD(a, b);
#endif
#undef FOUR
#undef ADD
#pragma GCC unroll 16
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(scores + j * step + v * LANES, a[j][v]);
}

#define TILE_SCORES(Q) \
    static __attribute__((noinline)) void four_##Q(int lane, const float *q, const float *k, long dim, vec sum[TILE][VECS]) { \
        four_lanes(Q, lane, q, k, dim, sum); \
    } \
    static void scores_##Q(const float *q, const float *k, long dim, float *scores, long step) { \
        panel_scores(Q, four_##Q, q, k, dim, scores, step); \
    }
EACH_COUNT(TILE_SCORES)
#undef TILE_SCORES

typedef void (*tile_scores_function)(const float *, const float *, long, float *, long);
#define SCORES_OF(Q) scores_##Q,
static const tile_scores_function scores_of[] = {0, EACH_COUNT(SCORES_OF)};
#undef SCORES_OF

/* Queries [first, first + count) of a tile whose row 0 stands at `position`; query j is head j % group of row j / group.
 * Scores count from `begin`, where the first query's lanes begin. */
static void attend_queries(const struct sequence *s, long row, long position, long first, long count, long begin, long step,
                           float *scores) {
    const struct attention *a = s->a;
    long dim = a->head_dim, group = a->group, end = position + (first + count - 1) / group + 1 - begin;
    float q[QUERY_FLOATS], sums[QUERY_FLOATS], packed[KEYS * MAX_HEAD_DIM], totals[TILE_QUERIES];
    struct ahead none = {packed, 0};
    for (long j = 0; j < count; j++) {
        const float *from = a->q + (row + (first + j) / group) * a->q_step + (s->head * group + (first + j) % group) * dim;
        for (long d = 0; d < dim; d += LANES) {
            store(q + j * dim + d, load(from + d) * spread(a->scale));
            store(sums + j * dim + d, (vec){0});
        }
    }
    for (long t = 0; t < end; t += KEYS) {
        pack_keys(s, begin + t, min_long(KEYS, end - t), packed);
        for (long j = 0; j < count; j += TILE) {
            long some = min_long(TILE, count - j), last = position + (first + j + some - 1) / group + 1 - begin;
            for (long i = 0; i < KEYS && t + i < last; i += PANEL)
                scores_of[some](q + j * dim, packed + i * dim, dim, scores + j * step + t + i, step);
        }
    }
    for (long j = 0; j < count; j++) {
        long at = position + (first + j) / group, last = position + (min_long(count, (j / TILE + 1) * TILE) - 1 + first) / group;
        totals[j] = weigh(scores + j * step, first_seen(a, at) - begin, at + 1 - begin, 0, last + 1 - begin, a->softcap);
    }
    for (long t = 0; t < end; t += KEYS) {
        pack_values(s, begin + t, min_long(KEYS, end - t), packed);
        for (long j = 0; j < count; j += TILE) {
            long some = min_long(TILE, count - j), last = position + (first + j + some - 1) / group + 1 - begin;
            for (long d = 0; d < dim && t < last; d += PANEL)
                float_values[some](scores + j * step + t, step, packed + d, dim, min_long(KEYS, last - t), none, sums + j * dim + d, dim);
        }
    }
    for (long j = 0; j < count; j++) {
        float *to = a->out + (row + (first + j) / group) * a->out_step + (s->head * group + (first + j) % group) * dim;
        for (long d = 0; d < dim; d += LANES) store(to + d, load(sums + j * dim + d) / spread(totals[j]));
    }
}

/* The last tiles first: of a chunk they have the most to do. */
static void attend_task(const void *context, long task, int thread) {
    const struct attention *a = context;
    const int64_t *t = a->tiles + (a->num_tiles - 1 - task / a->kv_heads) * 4, *table = a->blocks + t[3];
    long head = task % a->kv_heads, queries = t[1] * a->group;
    float *scores = a->scores + thread * a->scores_step;
    if (t[1] == 1) {
        attend_single(a, table, head, t[0], t[2], scores);
        return;
    }
    for (long first = 0, count; first < queries; first += count) {
        struct sequence s = {a, table, head, first_seen(a, t[2] + first / a->group)};
        long begin = lane_begin(s.first);
        long step = ceil_div(t[2] + t[1] - begin, KEYS) * KEYS;
        long most = min_long(min_long(TILE_QUERIES, QUERY_FLOATS / a->head_dim), a->scores_step / step);
        count = min_long(queries - first, max_long(TILE, most / TILE * TILE));
        attend_queries(&s, t[0], t[2], first, count, begin, step, scores);
    }
}

#endif
