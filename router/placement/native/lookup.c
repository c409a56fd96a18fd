/* How far each worker's blocks reach into a prompt (and, in keys.h, what the blocks of a prompt are called). block_table.py says the
   same in numpy, and is what this is tested against. */

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
    const uint64_t *const *const *masks; /* [tiers]: by word, [slots]; NULL: nothing lies in that tier */
    int64_t tiers, words, num_buckets, round;
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

/* keys: [n, 2]. blocks: [words * 64]; lower (NULL: nothing lies in a lower tier): [tiers - 1, words * 64], of the blocks those
   that lie in this tier and in no nearer one; both zeroed here. slots: room for n.
   now: 0, or what the first key that was found is stamped with, the others one less each.
   Returns: how many leading keys somebody holds. */
static int64_t runs(
    const Table *t, const uint64_t *keys, int64_t n, int64_t now, int64_t *slots, int64_t *blocks, int64_t *lower) {
    uint64_t alive[MAX_WORDS];
    int64_t words = t->words, depth = 0;
    for (int64_t i = 0; i < words * WORD; i++) blocks[i] = 0;
    for (int64_t i = 0; lower && i < (t->tiers - 1) * words * WORD; i++) lower[i] = 0;
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
            for (int64_t w = 0; w < words; w++) __builtin_prefetch(t->masks[0][w] + slot);
        }
        for (int64_t i = first; i < found; i++) {
            uint64_t any = 0;
            for (int64_t w = 0; w < words; w++) {
                uint64_t nearest = t->masks[0][w][slots[i]], held = nearest;
                for (int64_t tier = 1; lower && tier < t->tiers; tier++)
                    if (t->masks[tier]) held |= t->masks[tier][w][slots[i]];
                held &= alive[w];
                if (held != alive[w] && i) end_runs(blocks + w * WORD, alive[w] & ~held, i);
                alive[w] = held;
                any |= held;
                for (int64_t tier = 1; lower && tier < t->tiers; tier++) {
                    if (!t->masks[tier]) continue;
                    uint64_t there = t->masks[tier][w][slots[i]];
                    int64_t *counts = lower + ((tier - 1) * words + w) * WORD;
                    for (uint64_t left = held & there & ~nearest; left; left &= left - 1) counts[__builtin_ctzll(left)]++;
                    nearest |= there;
                }
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

/* Writes tokens into `into` [tiers, stride], at the group's places: of hits, at most `most` blocks each, and of those by lower
   tier; see runs.
   Returns: how many leading keys somebody holds, in the group or not. */
EXPORT int64_t diptych_hits(
    const Table *t, const Group *g, const uint64_t *keys, int64_t n, int64_t now, int64_t most, int64_t *slots,
    int64_t *blocks, int64_t *lower, int64_t *into, int64_t stride) {
    int64_t depth = runs(t, keys, n, now, slots, blocks, lower);
    if (!depth) return 0;
    for (int64_t i = 0; i < g->count; i++) {
        int64_t reach = blocks[g->columns[i]];
        if (reach > most) reach = most;
        into[g->at[i]] = g->block_size * reach;
        for (int64_t tier = 1; lower && tier < t->tiers; tier++) {
            int64_t there = lower[(tier - 1) * t->words * WORD + g->columns[i]];
            if (there > reach) there = reach;
            reach -= there;
            into[tier * stride + g->at[i]] = g->block_size * there;
        }
    }
    return depth;
}
