/* The loops of a placement decision: how far each worker's blocks reach into a prompt, and what every candidate costs (and, in
   keys.h, what the blocks of a prompt are called).

   block_table.py and policy.py say the same in numpy, and are what these are tested against: every float operation here is done
   in their order, so that both give the same bits (no contraction, no reassociation: see FLAGS in library.py). */

#include <math.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define WAYS 8
#define WORD 64
#define MAX_WORDS 16
#define BATCH 16 /* keys whose memory is asked for together */

#include "keys.h"

typedef struct {
    const uint32_t *tags; /* [buckets, WAYS] */
    uint32_t *stamps;     /* [slots] */
    const uint64_t *const *device, *const *host; /* by word, [slots]; host NULL: no such tier */
    int64_t words, num_buckets, round;
} Table;

static inline int64_t bucket_of(const Table *t, uint64_t half) {
    uint64_t at = half & (2 * (uint64_t)t->round - 1);
    return (int64_t)at >= t->num_buckets ? (int64_t)at - t->round : (int64_t)at;
}

static inline int64_t slot_in(const uint32_t *tags, int64_t bucket, uint32_t tag) {
    const uint32_t *ways = tags + bucket * WAYS;
    for (int way = 0; way < WAYS; way++)
        if (ways[way] == tag) return bucket * WAYS + way;
    return -1;
}

static void end_runs(int64_t *counts, uint64_t ended, int64_t length) {
    for (; ended; ended &= ended - 1) counts[__builtin_ctzll(ended)] = length;
}

/* A number of workers that name blocks alike: their places among P + D, and their columns in the table. */
typedef struct {
    const int64_t *at, *columns;
    int64_t count, block_size;
} Group;

/* keys: [n, 2]. blocks, host_blocks (NULL without a host tier): [words * 64], zeroed here. slots: room for n.
   now: 0, or what the first key that was found is stamped with, the others one less each.
   Returns: how many leading keys somebody holds. */
static int64_t runs(
    const Table *t, const uint64_t *keys, int64_t n, int64_t now, int64_t *slots, int64_t *blocks, int64_t *host_blocks) {
    uint64_t alive[MAX_WORDS];
    int64_t words = t->words, depth = 0;
    for (int64_t i = 0; i < words * WORD; i++) {
        blocks[i] = 0;
        if (host_blocks) host_blocks[i] = 0;
    }
    for (int64_t w = 0; w < words; w++) alive[w] = ~(uint64_t)0;
    int64_t buckets[2 * BATCH][2];
    for (int64_t first = 0; first < n; first += BATCH) {
        int64_t from = first ? first + BATCH : 0, to = first + 2 * BATCH < n ? first + 2 * BATCH : n;
        for (int64_t i = from; i < to; i++) { /* what the next batch will read is fetched meanwhile */
            int64_t *pair = buckets[i % (2 * BATCH)];
            for (int half = 0; half < 2; half++) {
                pair[half] = bucket_of(t, keys[2 * i + half]);
                __builtin_prefetch(t->tags + pair[half] * WAYS);
            }
        }
        int64_t last = first + BATCH < n ? first + BATCH : n, found = first;
        for (; found < last; found++) {
            const int64_t *pair = buckets[found % (2 * BATCH)];
            uint32_t tag = (uint32_t)(keys[2 * found] >> 32);
            int64_t slot = slot_in(t->tags, pair[0], tag);
            if (slot < 0) slot = slot_in(t->tags, pair[1], tag);
            if (slot < 0) break;
            slots[found] = slot;
            for (int64_t w = 0; w < words; w++) __builtin_prefetch(t->device[w] + slot);
        }
        for (int64_t i = first; i < found; i++) {
            uint64_t any = 0;
            for (int64_t w = 0; w < words; w++) {
                uint64_t device = t->device[w][slots[i]];
                uint64_t held = alive[w] & (t->host ? device | t->host[w][slots[i]] : device);
                if (held != alive[w] && i) end_runs(blocks + w * WORD, alive[w] & ~held, i);
                alive[w] = held;
                any |= held;
                if (host_blocks)
                    for (uint64_t left = held & ~device; left; left &= left - 1)
                        host_blocks[w * WORD + __builtin_ctzll(left)]++;
            }
            if (!any) goto done;
            depth = i + 1;
        }
        if (found < last) break;
    }
    if (depth)
        for (int64_t w = 0; w < words; w++) end_runs(blocks + w * WORD, alive[w], depth);
done:
    if (now)
        for (int64_t i = 0; i < depth; i++) t->stamps[slots[i]] = (uint32_t)(now - i);
    return depth;
}

/* Writes hits, host (NULL without a host tier; tokens, by place) of the group, at most `most` blocks each; see runs.
   Returns: how many leading keys somebody holds, in the group or not. */
EXPORT int64_t diptych_hits(
    const Table *t, const Group *g, const uint64_t *keys, int64_t n, int64_t now, int64_t most, int64_t *slots,
    int64_t *blocks, int64_t *host_blocks, int64_t *hits, int64_t *host) {
    int64_t depth = runs(t, keys, n, now, slots, blocks, host_blocks);
    if (!depth) return 0;
    for (int64_t i = 0; i < g->count; i++) {
        int64_t reach = blocks[g->columns[i]];
        if (reach > most) reach = most;
        hits[g->at[i]] = g->block_size * reach;
        if (host_blocks) {
            int64_t back = host_blocks[g->columns[i]];
            host[g->at[i]] = g->block_size * (back < reach ? back : reach);
        }
    }
    return depth;
}

/* out: [2, count], the sums of tokens and of requests at these columns of all: [2, width]. */
EXPORT void diptych_gather(const int64_t *all, int64_t width, const int64_t *columns, int64_t count, int64_t *out) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = all[columns[i]];
        out[count + i] = all[width + columns[i]];
    }
}

/* See Fleet in fleet.py. */
typedef struct {
    int64_t num_prefill, num_decode, any_alone;
    const int64_t *block_size; /* [D] */
    const double *token_ms, *host_token_ms, *idle_at_ms, *sequences, *step_ms, *move_ms, *handoff_ms;
    const uint8_t *alone;
} Fleet;

/* What a request finds, see Loads in fleet.py: [P + D]; hits, host NULL where nobody has any. */
typedef struct {
    const int64_t *hits, *host, *pending_tokens, *pending_requests;
} Loads;

/* See PlacementRequest. barred: decode workers that must not be taken. */
typedef struct {
    const int64_t *barred;
    int64_t num_barred, num_tokens, local_max, wants_kv, may_fall_back;
    double now_ms;
} Request;

/* See Costs in policy.py; what is computed is written to. */
typedef struct {
    double *queue, *compute, *sequences, *decode_load, *remote, *local;
    int64_t *ties; /* [P * D] */
    double least_remote, least_local;
    int64_t has_local;
} Costs;

EXPORT void diptych_charge(const Fleet *f, const Loads *l, const Request *r, Costs *c) {
    const int64_t *hits = l->hits, *host = l->host, *pending_tokens = l->pending_tokens;
    const int64_t *pending_requests = l->pending_requests, *barred = r->barred;
    int64_t num_barred = r->num_barred, num_tokens = r->num_tokens, local_max = r->local_max;
    int64_t wants_kv = r->wants_kv, may_fall_back = r->may_fall_back;
    double now_ms = r->now_ms;
    int64_t P = f->num_prefill, D = f->num_decode, n = P + D;
    for (int64_t i = 0; i < n; i++) {
        double placed = (double)pending_tokens[i] * f->token_ms[i], left = f->idle_at_ms[i] - now_ms;
        c->queue[i] = placed > left ? placed : left;
        double compute = (double)(num_tokens - (hits ? hits[i] : 0)) * f->token_ms[i];
        if (host) compute += (double)host[i] * f->host_token_ms[i];
        c->compute[i] = compute;
    }
    int64_t least_hit = num_tokens - local_max, fall_back = may_fall_back && f->any_alone;
    c->has_local = 0;
    c->least_local = INFINITY;
    c->least_remote = INFINITY;
    for (int64_t d = 0; d < D; d++) {
        int64_t at = P + d;
        double requests = (double)pending_requests[at];
        double sequences = f->sequences[d] > requests ? f->sequences[d] : requests;
        c->sequences[d] = sequences;
        c->decode_load[d] = f->step_ms[d] * sequences;
        c->local[d] = INFINITY;
        if ((hits ? hits[at] : 0) >= least_hit || (fall_back && f->alone[d])) {
            c->has_local = 1;
            c->local[d] = c->queue[at] + c->decode_load[d] + c->compute[at] * (1.0 + sequences) + 1.0;
        }
    }
    for (int64_t i = 0; i < num_barred; i++) c->local[barred[i]] = INFINITY;
    for (int64_t d = 0; d < D; d++)
        if (c->local[d] < c->least_local) c->least_local = c->local[d];
    double row[D], uncached[D];
    for (int64_t d = 0; d < D; d++) {
        row[d] = c->decode_load[d];
        if (host && wants_kv) row[d] += (double)host[P + d] * f->host_token_ms[P + d];
        uncached[d] = (double)(num_tokens - (hits ? hits[P + d] : 0));
    }
    for (int64_t p = 0; p < P; p++) {
        double first = c->queue[p] + c->compute[p];
        const double *move = f->move_ms + p * D, *handoff = f->handoff_ms + p * D;
        double *remote = c->remote + p * D;
        if (wants_kv)
            for (int64_t d = 0; d < D; d++) remote[d] = move[d] * uncached[d] + first + row[d] + handoff[d];
        else
            for (int64_t d = 0; d < D; d++) remote[d] = handoff[d] + first + row[d];
        for (int64_t i = 0; i < num_barred; i++) remote[barred[i]] = INFINITY;
        for (int64_t d = 0; d < D; d++)
            if (remote[d] < c->least_remote) c->least_remote = remote[d];
    }
}

static int64_t two(int64_t count, const double *chance, int64_t *second) {
    if (count == 1) return *second = 0;
    int64_t first = (int64_t)(chance[0] * (double)count);
    *second = (int64_t)(chance[1] * (double)(count - 1));
    *second += *second >= first;
    return first;
}

/* See CheapestPair in policy.py. chance: two numbers in [0, 1). choice: p (-1: none) and d are written to it. */
EXPORT void diptych_pick(
    const Fleet *f, const Loads *l, const Request *r, const Costs *c, double tie_ms, double tie_fraction,
    double chance_1, double chance_2, int64_t *choice) {
    int64_t P = f->num_prefill, D = f->num_decode, count = 0, second;
    const double chance[2] = {chance_1, chance_2};
    double least_remote = c->least_remote;
    uint8_t full[D];
    int64_t any_full = 0;
    if (c->has_local && l->hits)
        for (int64_t d = 0; d < D; d++) {
            int64_t hit = l->hits[P + d], left = r->num_tokens - hit;
            int64_t few = f->block_size[d] < r->local_max ? f->block_size[d] : r->local_max;
            any_full |= full[d] = left <= few && left > 0 && hit > 0;
        }
    if (any_full) {
        least_remote = INFINITY;
        for (int64_t i = 0; i < P * D; i++)
            if (!full[i % D] && c->remote[i] < least_remote) least_remote = c->remote[i];
    }
    double least = c->least_local < least_remote ? c->least_local : least_remote;
    double slack = least * tie_fraction > tie_ms ? least * tie_fraction : tie_ms, limit = least + slack;
    const int64_t *pending = l->pending_requests;
    int64_t *ties = c->ties;
    if (c->has_local && c->least_local <= least_remote) {
        for (int64_t d = 0; d < D; d++)
            if (c->local[d] <= limit) ties[count++] = d;
        int64_t d = ties[two(count, chance, &second)], other = ties[second];
        if (pending[P + other] < pending[P + d]
            || (pending[P + other] == pending[P + d] && c->local[other] < c->local[d]))
            d = other;
        choice[0] = -1;
        choice[1] = d;
        return;
    }
    for (int64_t i = 0; i < P * D; i++)
        if (c->remote[i] <= limit && !(any_full && full[i % D])) ties[count++] = i;
    int64_t pair = ties[two(count, chance, &second)], other = ties[second];
    int64_t mine = pending[pair / D] + pending[P + pair % D], others = pending[other / D] + pending[P + other % D];
    if (others < mine || (others == mine && c->remote[other] < c->remote[pair])) pair = other;
    choice[0] = pair / D;
    choice[1] = pair % D;
}

/* The `most` cheapest prefill workers for decode worker d, cheapest first, of equals the first. Returns: how many. */
EXPORT int64_t diptych_order(const Fleet *f, const Costs *c, int64_t d, int64_t most, int64_t *order) {
    int64_t count = 0;
    for (int64_t p = 0; p < f->num_prefill; p++) {
        double cost = c->remote[p * f->num_decode + d];
        if (cost == INFINITY) continue;
        int64_t at = count < most ? count++ : most;
        for (; at && c->remote[order[at - 1] * f->num_decode + d] > cost; at--)
            if (at < most) order[at] = order[at - 1];
        if (at < most) order[at] = p;
    }
    return count;
}

/* What stays the same from one decision of a fleet to the next. found: [4, count], hits and the host tier's tokens as they were
   looked up, and room for what is pending. chosen: room for p, d and `most` prefill workers. */
typedef struct {
    const int64_t *all, *columns;
    int64_t width, count, *found;
    const Fleet *fleet;
    Loads *loads;
    Request *request;
    Costs *costs;
    double tie_ms, tie_fraction;
    int64_t most, *chosen;
} Decision;

/* gather, charge, pick and order in one call, where nobody is barred. tiers: 0: no hits; 1: hits; 2: and a host tier.
   Returns: how many prefill workers were ordered, or -1 when nobody is a candidate. */
EXPORT int64_t diptych_decide(
    const Decision *x, int64_t tiers, int64_t num_tokens, int64_t local_max, int64_t wants_kv, int64_t may_fall_back,
    double now_ms, double chance_1, double chance_2) {
    diptych_gather(x->all, x->width, x->columns, x->count, x->found + 2 * x->count);
    x->loads->hits = tiers ? x->found : 0;
    x->loads->host = tiers == 2 ? x->found + x->count : 0;
    Request *r = x->request;
    r->num_barred = 0;
    r->num_tokens = num_tokens;
    r->local_max = local_max;
    r->wants_kv = wants_kv;
    r->may_fall_back = may_fall_back;
    r->now_ms = now_ms;
    diptych_charge(x->fleet, x->loads, r, x->costs);
    if (x->costs->least_remote == INFINITY && x->costs->least_local == INFINITY) return -1;
    diptych_pick(x->fleet, x->loads, r, x->costs, x->tie_ms, x->tie_fraction, chance_1, chance_2, x->chosen);
    return diptych_order(x->fleet, x->costs, x->chosen[1], x->most, x->chosen + 2);
}
