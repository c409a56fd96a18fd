/* Attention straight from the paged pool [blocks][layers][2][block_size][kv_heads][head_dim].
 *
 * A tile is a few neighbouring rows of one sequence; one task serves a tile and one KV head with the query heads that share
 * it. Every query goes through its tokens in their order: its result depends neither on the rows beside it nor on how a prompt
 * was cut into chunks, bit for bit.
 */
#ifndef DIPTYCH_ATTENTION_H
#define DIPTYCH_ATTENTION_H

#include "matmul.h"

#define MAX_HEAD_DIM 256

struct attention {
    const float *pool;      /* of this layer: K of block b begins at pool + b * block_step, its V v_offset behind */
    const float *q;         /* row r, head h: q + r * q_step + h * head_dim */
    float *out;             /* row r, head h: out + r * out_step + h * head_dim */
    const int64_t *tiles;   /* [num_tiles][4]: first row, rows, position of the first row, where its block table begins */
    const int64_t *blocks;  /* the block tables */
    float *scores;          /* [threads][TILE][max_len] */
    long num_tiles, block_step, v_offset, block_size, kv_heads, group, head_dim, q_step, out_step, max_len;
    long window;            /* tokens that a query sees; 0: all */
    float scale;
};

/* Queries of one KV head that go through a tile together, and rows of a tile. */
INLINE long heads_together(long group) {
    long heads = min_long(group, TILE);
    while (group % heads) heads--;
    return heads;
}
INLINE long tile_rows(long group) { return max_long(1, TILE / group); }

/* scores[j][t] = q[j] . k[t]. Two keys at a time share the loads of q; the sums over the lanes are taken LANES keys at once. */
INLINE void block_scores(const int queries, const float (*q)[MAX_HEAD_DIM], const float *k, long step, long dim, long count,
                         float *scores, long scores_step) {
    for (long t = 0; t < count; t += LANES) {
        vec parts[TILE][LANES];
        long some = min_long(LANES, count - t);
        for (long i = 0; i < some; i += 2) {
            const float *one = k + (t + i) * step, *two = i + 1 < some ? one + step : one;
            vec sum[TILE][2];
#pragma GCC unroll 16
            for (int j = 0; j < queries; j++) sum[j][0] = sum[j][1] = (vec){0};
            for (long d = 0; d < dim; d += LANES) {
                vec first = load(one + d), second = load(two + d);
#pragma GCC unroll 16
                for (int j = 0; j < queries; j++) {
                    vec query = load(q[j] + d);
                    sum[j][0] += query * first;
                    sum[j][1] += query * second;
                }
            }
#pragma GCC unroll 16
            for (int j = 0; j < queries; j++) parts[j][i] = sum[j][0], parts[j][i + 1] = sum[j][1];
        }
        for (int j = 0; j < queries; j++) {
            if (some == LANES) store(scores + j * scores_step + t, sum_each(parts[j]));
            else
                for (long i = 0; i < some; i++) scores[j * scores_step + t + i] = sum_lanes(parts[j][i]);
        }
    }
}

/* sum[j] += p[j][t] * v[t], VECS registers wide */
INLINE void block_values(const int queries, const float *p, long p_step, const float *v, long step, long count, float *sums,
                         long sums_step) {
    vec sum[TILE][VECS];
#pragma GCC unroll 16
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) sum[j][i] = load(sums + j * sums_step + i * LANES);
    for (long t = 0; t < count; t++, v += step) {
        vec value[VECS];
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) value[i] = load(v + i * LANES);
#pragma GCC unroll 16
        for (int j = 0; j < queries; j++) {
            vec weight = spread(p[j * p_step + t]);
#pragma GCC unroll 4
            for (int i = 0; i < VECS; i++) sum[j][i] += weight * value[i];
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) store(sums + j * sums_step + i * LANES, sum[j][i]);
}

/* Scores to weights that add up to the returned sum. A NaN among them makes the sum NaN. */
static float soften(float *scores, long count) {
    float highest = scores[0];
    long whole = count - count % LANES;
    if (whole) {
        vec most = load(scores);
        for (long t = LANES; t < whole; t += LANES) {
            vec some = load(scores + t);
            most = choose(some > most, some, most);
        }
        for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    }
    for (long t = whole; t < count; t++) highest = scores[t] > highest ? scores[t] : highest;
    vec top = spread(highest), sum = {0};
    for (long t = 0; t < count; t += LANES) {
        float part[LANES];
        vec value;
        if (t + LANES <= count) {
            value = exp_lanes(load(scores + t) - top);
            store(scores + t, value);
        } else {
            for (long i = 0; i < LANES; i++) part[i] = t + i < count ? scores[t + i] : highest;
            store(part, exp_lanes(load(part) - top));
            for (long i = 0; i < LANES; i++) {
                if (t + i < count) scores[t + i] = part[i];
                else part[i] = 0.0f;
            }
            value = load(part);
        }
        sum += value;
    }
    return sum_lanes(sum);
}

INLINE void attend_queries(const int queries, const struct attention *a, const int64_t *table, long kv_head, long head,
                           long heads, long first_row, long position, float *scores) {
    float q[TILE][MAX_HEAD_DIM], sums[TILE][MAX_HEAD_DIM], totals[TILE];
    long dim = a->head_dim, step = a->kv_heads * dim, size = a->block_size;
    long rows = queries / heads, end = position + rows;
    long begin = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    begin -= begin % LANES; /* so that the lanes of a query's sums do not depend on its tile */
    for (int j = 0; j < queries; j++) {
        const float *from = a->q + (first_row + j / heads) * a->q_step + (head + j % heads) * dim;
        for (long d = 0; d < dim; d += LANES) {
            store(q[j] + d, load(from + d) * spread(a->scale));
            store(sums[j] + d, (vec){0});
        }
    }
    for (long t = begin; t < end;) {
        long offset = t % size, count = min_long(size - offset, end - t);
        const float *k = a->pool + table[t / size] * a->block_step + kv_head * dim + offset * step;
        block_scores(queries, q, k, step, dim, count, scores + t, a->max_len);
        t += count;
    }
    for (int j = 0; j < queries; j++) {
        float *own = scores + j * a->max_len;
        long last = position + j / heads + 1, first = a->window ? max_long(0, last - a->window) : 0;
        long from = first - first % LANES;
        for (long t = from; t < first; t++) own[t] = -INFINITY;
        totals[j] = soften(own + from, last - from);
        for (long t = begin; t < first; t++) own[t] = 0.0f;
        for (long t = last; t < end; t++) own[t] = 0.0f;
    }
    for (long t = begin; t < end;) {
        long offset = t % size, count = min_long(size - offset, end - t);
        const float *v = a->pool + table[t / size] * a->block_step + a->v_offset + kv_head * dim + offset * step;
        for (long d = 0; d < dim; d += PANEL)
            block_values(queries, scores + t, a->max_len, v + d, step, count, sums[0] + d, MAX_HEAD_DIM);
        t += count;
    }
    for (int j = 0; j < queries; j++) {
        float *to = a->out + (first_row + j / heads) * a->out_step + (head + j % heads) * dim;
        for (long d = 0; d < dim; d += LANES) store(to + d, load(sums[j] + d) / spread(totals[j]));
    }
}

static void attend_task(const void *context, long task, int thread) {
    const struct attention *a = context;
    const int64_t *t = a->tiles + task / a->kv_heads * 4;
    long kv_head = task % a->kv_heads, heads = heads_together(a->group);
    float *scores = a->scores + thread * TILE * a->max_len;
    for (long head = kv_head * a->group; head < (kv_head + 1) * a->group; head += heads) {
#define CASE(Q) \
    case Q: attend_queries(Q, a, a->blocks + t[3], kv_head, head, heads, t[0], t[2], scores); break;
        switch (heads * t[1]) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if TILE >= 6
            CASE(6)
#endif
#if TILE >= 12
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
#undef CASE
    }
}

#endif
