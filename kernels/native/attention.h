/* Attention straight from the paged pool [blocks][layers][2][block_size][kv_heads][head_dim], for rows that are alone in their
 * sequence's step; attention_tile.h has those that come in chunks. Of a quantized pool a token has a slot as kv_codes.h says.
 *
 * One task serves a row and one KV head with the query heads that share it, or, where there are many rows, a row with all its
 * heads. Every query goes through its tokens in their order, and every sum over lanes has its one order: a result depends neither
 * on the rows beside it nor on how a prompt was cut into chunks, bit for bit.
 */
#ifndef DIPTYCH_ATTENTION_H
#define DIPTYCH_ATTENTION_H

#include "kv_codes.h"
#include "matmul.h"

#define MAX_HEAD_DIM 256
#define MAX_ROW 4096      /* heads * head_dim of a row that goes through the KV with all its heads */
#define MAX_ROW_HEADS 64
#define DECODED 32        /* tokens whose codes are decoded at a time */
#define ROW_SCORES (32 << 10) /* of a row with all its heads: 128 KiB, so that they stay in the cache. Longer ones go head by head */

struct attention {
    const float *pool;      /* of this layer: K of block b begins at pool + b * block_step, its V v_offset behind */
    const float *q;         /* row r, head h: q + r * q_step + h * head_dim */
    float *out;             /* row r, head h: out + r * out_step + h * head_dim */
    const int64_t *tiles;   /* [num_tiles][4]: first row, rows, position of the first row, where its block table begins */
    const int64_t *blocks;  /* the block tables */
    float *scores;          /* [threads][scores_step], room for TILE * max_len at least */
    long scores_step, whole_rows; /* whole_rows: single rows go with all heads, where they fit */
    long num_tiles, block_step, v_offset, block_size, kv_heads, group, head_dim, q_step, out_step, max_len;
    long codes, slot;       /* kind of codes; floats of a token's K, or V, of all heads */
    long window;            /* tokens that a query sees; 0: all. What lies before the first of them is not read */
    float scale;            /* of the queries */
    float softcap;          /* a score s becomes softcap * tanh(s / softcap); 0: it stays */
};

/* Queries of one KV head that go through a row's tokens together. */
INLINE long heads_together(long group) {
    long heads = min_long(group, TILE);
    while (group % heads) heads--;
    return heads;
}

/* Rows that are read a little later: asked for, a row at a time, while others are computed. Blocks lie anywhere in memory, and
 * no hardware foresees the next one. */
struct ahead {
    const float *rows;
    long count;
};

/* scores[j][t] = q[j] . k[t]. Two keys at a time share the loads of q; the sums over the lanes are taken LANES keys at once. */
INLINE void block_scores(const int codes, const int queries, const float *q, long q_step, const float *k, long step, long dim,
                         long count, struct ahead ahead, float *scores, long scores_step) {
    for (long t = 0; t < count; t += LANES) {
        vec parts[TILE][LANES];
        long some = min_long(LANES, count - t);
        for (long i = 0; i < some; i += 2) {
            const float *one = k + (t + i) * step, *two = i + 1 < some ? one + step : one;
            for (long row = t + i; row < min_long(t + i + 2, ahead.count); row++)
                for (long d = 0; d < plain_floats(codes, dim); d += 16) __builtin_prefetch(ahead.rows + row * step + d);
            vec sum[TILE][2];
#pragma GCC unroll 16
            for (int j = 0; j < queries; j++) sum[j][0] = sum[j][1] = (vec){0};
            for (long d = 0; d < dim; d += LANES) {
                vec first = load_plain(codes, one, d), second = load_plain(codes, two, d);
#pragma GCC unroll 16
                for (int j = 0; j < queries; j++) {
                    vec query = load(q + j * q_step + d);
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
INLINE void block_values(const int codes, const int queries, const float *p, long p_step, const float *v, long step, long count,
                         struct ahead ahead, float *sums, long sums_step) {
    vec sum[TILE][VECS];
#pragma GCC unroll 16
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) sum[j][i] = load(sums + j * sums_step + i * LANES);
    for (long t = 0; t < count; t++, v += step) {
        if (t < ahead.count)
            for (int at = 0; at < plain_floats(codes, PANEL); at += 16) __builtin_prefetch(ahead.rows + t * step + at);
        vec value[VECS];
#pragma GCC unroll 4
        for (int i = 0; i < VECS; i++) value[i] = load_plain(codes, v, i * LANES);
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

/* By kind of codes and number of queries: both attend_heads and attend_row call them, so that each is compiled once. */
typedef void (*scores_function)(const float *q, long q_step, const float *k, long step, long dim, long count, struct ahead ahead,
                                float *scores, long scores_step);
typedef void (*values_function)(const float *p, long p_step, const float *v, long step, long count, struct ahead ahead, float *sums,
                                long sums_step);
#define BLOCK_OF(KIND, CODES, Q) \
    static void scores_##KIND##_##Q(const float *q, long q_step, const float *k, long step, long dim, long count, \
                                    struct ahead ahead, float *scores, long scores_step) { \
        block_scores(CODES, Q, q, q_step, k, step, dim, count, ahead, scores, scores_step); \
    } \
    static void values_##KIND##_##Q(const float *p, long p_step, const float *v, long step, long count, struct ahead ahead, \
                                    float *sums, long sums_step) { \
        block_values(CODES, Q, p, p_step, v, step, count, ahead, sums, sums_step); \
    }
#define OF_FLOATS(Q) BLOCK_OF(floats, FLOATS, Q)
#define OF_BFLOATS(Q) BLOCK_OF(bfloats, BFLOATS, Q)
EACH_COUNT(OF_FLOATS)
EACH_COUNT(OF_BFLOATS)
#undef OF_FLOATS
#undef OF_BFLOATS
#define NAME(Q) scores_floats_##Q,
static const scores_function float_scores[] = {0, EACH_COUNT(NAME)};
#undef NAME
#define NAME(Q) scores_bfloats_##Q,
static const scores_function bfloat_scores[] = {0, EACH_COUNT(NAME)};
#undef NAME
#define NAME(Q) values_floats_##Q,
static const values_function float_values[] = {0, EACH_COUNT(NAME)};
#undef NAME
#define NAME(Q) values_bfloats_##Q,
static const values_function bfloat_values[] = {0, EACH_COUNT(NAME)};
#undef NAME

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

/* First token that the query at `position` sees; and where its lanes begin, so that their sums do not depend on its tile. */
INLINE long first_seen(const struct attention *a, long position) {
    return a->window ? max_long(0, position + 1 - a->window) : 0;
}
INLINE long lane_begin(long first) { return first - first % LANES; }

/* values[i] = cap * tanh(values[i] / cap), each as if it were alone. */
static void cap_values(float *values, long count, float cap) {
    for (long i = 0; i < count; i += LANES) {
        float part[LANES] = {0};
        long some = min_long(LANES, count - i);
        vec value = some == LANES ? load(values + i) : (memcpy(part, values + i, some * sizeof(float)), load(part));
        value = spread(cap) * tanh_lanes(value / spread(cap));
        if (some == LANES) store(values + i, value);
        else store(part, value), memcpy(values + i, part, some * sizeof(float));
    }
}

/* A query's scores of tokens [begin, end) to weights; what is not in [first, last) weighs nothing. Its lanes begin where those of
 * token 0 do. */
INLINE float weigh(float *own, long first, long last, long begin, long end, float softcap) {
    long from = lane_begin(first);
    if (softcap != 0.0f) cap_values(own + first, last - first, softcap);
    for (long t = from; t < first; t++) own[t] = -INFINITY;
    float total = soften(own + from, last - from);
    for (long t = begin; t < first; t++) own[t] = 0.0f;
    for (long t = last; t < end; t++) own[t] = 0.0f;
    return total;
}

/* K of tokens from `t` on, or V, of one KV head as floats `step` apart: at most `count`, within a block. */
struct stretch {
    const float *rows;
    long step, count;
};

/* offset: 0, or v_offset. room: DECODED * head_dim floats. */
INLINE struct stretch head_rows(const struct attention *a, const int64_t *table, long kv_head, long offset, long t, long count,
                                float *room) {
    long inside = t % a->block_size;
    const float *slots = a->pool + table[t / a->block_size] * a->block_step + offset + inside * a->slot;
    count = min_long(count, a->block_size - inside);
    if (a->codes == FLOATS) return (struct stretch){slots + kv_head * a->head_dim, a->slot, count};
    count = min_long(count, DECODED);
    for (long i = 0; i < count; i++)
        decode_head(a->codes, slots + i * a->slot, a->kv_heads, kv_head, a->head_dim, room + i * a->head_dim);
    return (struct stretch){room, a->head_dim, count};
}

/* One row and `heads` query heads of a KV head, from `head` on. */
static void attend_heads(long heads, const struct attention *a, const int64_t *table, long kv_head, long head, long row,
                         long position, float *scores) {
    float q[TILE][MAX_HEAD_DIM], sums[TILE][MAX_HEAD_DIM], totals[TILE], room[DECODED * MAX_HEAD_DIM];
    long dim = a->head_dim, end = position + 1;
    long first = first_seen(a, position);
    struct ahead none = {a->pool, 0};
    for (int j = 0; j < heads; j++) {
        const float *from = a->q + row * a->q_step + (head + j) * dim;
        for (long d = 0; d < dim; d += LANES) {
            store(q[j] + d, load(from + d) * spread(a->scale));
            store(sums[j] + d, (vec){0});
        }
    }
    for (long t = first; t < end;) {
        struct stretch k = head_rows(a, table, kv_head, 0, t, end - t, room);
        float_scores[heads](q[0], MAX_HEAD_DIM, k.rows, k.step, dim, k.count, none, scores + t, a->max_len);
        t += k.count;
    }
    for (int j = 0; j < heads; j++) totals[j] = weigh(scores + j * a->max_len, first, end, first, end, a->softcap);
    for (long t = first; t < end;) {
        struct stretch v = head_rows(a, table, kv_head, a->v_offset, t, end - t, room);
        for (long d = 0; d < dim; d += PANEL)
            float_values[heads](scores + t, a->max_len, v.rows + d, v.step, v.count, none, sums[0] + d, MAX_HEAD_DIM);
        t += v.count;
    }
    for (int j = 0; j < heads; j++) {
        float *to = a->out + row * a->out_step + (head + j) * dim;
        for (long d = 0; d < dim; d += LANES) store(to + d, load(sums[j] + d) / spread(totals[j]));
    }
}

/* One row with all its heads, of a pool without scales: a block's K of all KV heads is one stretch of memory, and so is its V.
 * `together` query heads of a KV head go through it at a time. */
static void attend_row(const struct attention *a, long together, const int64_t *table, long row, long position, float *scores) {
    const int codes = a->codes;
    const scores_function scores_of_block = (codes == BFLOATS ? bfloat_scores : float_scores)[together];
    const values_function values_of_block = (codes == BFLOATS ? bfloat_values : float_values)[together];
    float q[MAX_ROW], totals[MAX_ROW_HEADS], *out = a->out + row * a->out_step;
    long dim = a->head_dim, step = a->slot, size = a->block_size, heads = a->kv_heads * a->group;
    long end = position + 1, first = first_seen(a, position);
    for (long d = 0; d < heads * dim; d += LANES) {
        store(q + d, load(a->q + row * a->q_step + d) * spread(a->scale));
        store(out + d, (vec){0});
    }
    for (long t = first; t < end;) {
        long offset = t % size, count = min_long(size - offset, end - t), next = t + count;
        const float *k = a->pool + table[t / size] * a->block_step + offset * step;
        /* behind the last K comes the first V */
        const float *then = next < end ? a->pool + table[next / size] * a->block_step
                                       : a->pool + table[first / size] * a->block_step + a->v_offset;
        struct ahead ahead = {then, next < end ? min_long(size, end - next) : min_long(size, end - first / size * size)};
        for (long head = 0; head < heads; head += together) {
            long at = plain_floats(codes, head / a->group * dim);
            struct ahead part = {ahead.rows + at, ahead.count};
            scores_of_block(q + head * dim, dim, k + at, step, dim, count, part, scores + head * end + t, end);
        }
        t = next;
    }
    for (long head = 0; head < heads; head++) totals[head] = weigh(scores + head * end, first, end, first, end, a->softcap);
    for (long t = first; t < end;) {
        long offset = t % size, count = min_long(size - offset, end - t), next = t + count;
        const float *v = a->pool + table[t / size] * a->block_step + a->v_offset + offset * step;
        struct ahead ahead = {a->pool, 0};
        if (next < end)
            ahead = (struct ahead){a->pool + table[next / size] * a->block_step + a->v_offset, min_long(size, end - next)};
        for (long head = 0; head < heads; head += together)
            for (long d = 0; d < dim; d += PANEL) {
                long at = plain_floats(codes, head / a->group * dim + d);
                struct ahead part = {ahead.rows + at, ahead.count};
                values_of_block(scores + head * end + t, end, v + at, step, count, part, out + head * dim + d, dim);
            }
        t = next;
    }
    for (long head = 0; head < heads; head++)
        for (long d = head * dim; d < (head + 1) * dim; d += LANES) store(out + d, load(out + d) / spread(totals[head]));
}

/* One row: with all its heads where that is wanted and fits (the task of the first KV head serves them all then). */
static void attend_single(const struct attention *a, const int64_t *table, long kv_head, long row, long position, float *scores) {
    long heads = heads_together(a->group), all = a->kv_heads * a->group;
    if (a->whole_rows && is_plain(a->codes) && all * (position + 1) <= min_long(ROW_SCORES, a->scores_step) &&
        all <= MAX_ROW_HEADS && all * a->head_dim <= MAX_ROW) {
        if (!kv_head) attend_row(a, heads, table, row, position, scores);
        return;
    }
    for (long head = kv_head * a->group; head < (kv_head + 1) * a->group; head += heads)
        attend_heads(heads, a, table, kv_head, head, row, position, scores);
}

#endif
