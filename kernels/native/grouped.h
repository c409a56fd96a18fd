/* Weights that are codes of a few bits, with a scale (and an offset) for each group of inputs, times floats.
 *
 * A group is taken in stretches of at most STRETCH inputs. Over a stretch a row is held in fixed point, as integers of 16 bits with a
 * power of two for a unit, so that its largest value has 15 of them. Products with codes are then integers, added up exactly: every
 * instruction set, every width and any company have the same sums. A result is, stretch after stretch,
 *
 *     y += (sum of x) * offset      y += (sum of x * code) * (unit * scale)
 *
 * Codes are met as unsigned bytes, `middle` above what they mean; middle times the sum of x is taken off before the products.
 *
 * DOT_VNNI: an x is two signed bytes, 256 * high + low, with a sum of products each. Else it is an int16.
 */
#ifndef DIPTYCH_GROUPED_H
#define DIPTYCH_GROUPED_H

#include "int8.h"

#define STRETCH 128     /* sums of 128 products with 8 bits stay within int32 */
#define GROUPED_ROWS 96 /* that share what was unpacked */
#define FEW 3           /* rows that unpack codes as they meet them */
#define EARLY 8192      /* bytes of codes that are asked for before a few rows meet them */
#define FIXED_LIMIT 32639.0f /* 127 * 256 + 127 */

/* TILE_GROUPED: rows of one pass over unpacked codes. PAIR_ROWS: that go over two panels at once. */
#if defined(DOT_VNNI)
#define SUMS 2
#define TILE_GROUPED (LANES == 16 ? 6 : 3)
#define PAIR_ROWS (LANES == 16 ? 3 : 1)
#else
#define SUMS 1
#define TILE_GROUPED TILE_INT8
#define PAIR_ROWS FEW
#endif

/* ---- a row: its stretches' heads, then its inputs in the order of the codes ---- */

/* total: the sum of x. start: what the sums begin with. */
struct stretch_head {
    float unit, total;
    uint32_t start[2];
};

INLINE long num_stretches(long inputs, long group) { return inputs / group * ceil_div(group, STRETCH); }
INLINE long grouped_head_bytes(long inputs, long group) { return whole_lines(num_stretches(inputs, group) * (long)sizeof(struct stretch_head)); }
INLINE long grouped_row_bytes(long inputs, long group) { return grouped_head_bytes(inputs, group) + whole_lines(inputs * 2); }

/* What brings the largest value of a stretch to FIXED_LIMIT or less, and more than half of it; it and its inverse are normal numbers.
 * NaN for what is no number. */
INLINE float fixed_point(float most) {
    uint32_t bits, exponent;
    float factor;
    if (!(most <= 3.402823466e38f)) return NAN;
    memcpy(&bits, &most, 4);
    exponent = bits >> 23 < 15 ? 15 : bits >> 23;
    for (;; exponent++) {
        bits = (268 - exponent) << 23;
        memcpy(&factor, &bits, 4);
        if (most * factor <= FIXED_LIMIT) return factor;
    }
}

/* A stretch of `count` inputs, a multiple of 16, to codes [inputs] (of which these begin with input k). */
static struct stretch_head fix_stretch(const float *x, long count, uint32_t middle, char *codes, long k, long inputs) {
    vec most = {0}, strange = {0};
    for (long i = 0; i < count; i += LANES) {
        vec size = size_of(load(x + i));
        most = choose(size > most, size, most);
        strange += size - size;
    }
    float highest = sum_lanes(strange);
    for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    float factor = fixed_point(highest);
    vec known = spread(factor == factor ? factor : 0.0f);
    const vec shift = spread(12582912.0f); /* see exp_lanes */
    word total = {0}, lows = {0};
    for (long i = 0; i < count; i += LANES) {
        vec value = load(x + i);
        value = choose(value == value, value * known, (vec){0});
        ivec fixed = (ivec)(choose(size_of(value) <= spread(FIXED_LIMIT), value, (vec){0}) + shift) - (ivec)shift;
        total += (word)fixed;
#if defined(DOT_VNNI)
        ivec low = ((fixed + 128) & 255) - 128;
        bytes narrow_low = __builtin_convertvector(low, bytes), narrow_high = __builtin_convertvector((fixed - low) >> 8, bytes);
        lows += (word)low;
        memcpy(codes + k + i, &narrow_high, LANES);
        memcpy(codes + inputs + k + i, &narrow_low, LANES);
#else
        (void)inputs;
        int16_t *to = (int16_t *)codes + k + i; /* pairs: 0 2 1 3 */
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) to[lane / 4 * 4 + lane % 2 * 2 + lane % 4 / 2] = (int16_t)fixed[lane];
#endif
    }
    uint32_t sum = 0, low_sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i], low_sum += lows[i];
    struct stretch_head head = {1.0f / factor, (float)(int32_t)sum / factor, {0, 0}};
#if defined(DOT_VNNI)
    head.start[0] = -middle * ((uint32_t)((int32_t)(sum - low_sum) / 256)), head.start[1] = -middle * low_sum;
#else
    head.start[0] = -middle * sum;
#endif
    return head;
}

/* order: input order[k] of x meets input k of the weights; NULL: as they are. */
static void fix_row(const float *x, const int32_t *order, long inputs, long group, uint32_t middle, char *to) {
    struct stretch_head *head = (struct stretch_head *)to;
    char *codes = to + grouped_head_bytes(inputs, group);
    float moved[STRETCH];
    for (long first = 0; first < inputs; first += group)
        for (long at = 0; at < group; at += STRETCH) {
            long k = first + at, count = min_long(STRETCH, group - at);
            const float *from = x + k;
            if (order) {
                for (long i = 0; i < count; i++) moved[i] = x[order[k + i]];
                from = moved;
            }
            *head++ = fix_stretch(from, count, middle, codes, k, inputs);
        }
}

/* ---- rows over one stretch ---- */

/* Of one or two panels. */
struct span {
    const struct linear *job;
    const char *panel;
    const char *bytes; /* [count / 4][PANEL] words: codes as bytes, for more than FEW rows */
    const char *soon;  /* what is read next: soon_step bytes of it are asked for beside four inputs, for more than FEW rows; or NULL */
    long k, count, index, codes_at, soon_step;
    vec scale[2 * VECS], offset[2 * VECS];
};
typedef void (*stretch_function)(const struct span *s, long row, vec *sums);

/* single, twice: up to FEW rows with one panel, and up to PAIR_ROWS with two. unpack: inputs [k, k + count) of a panel to bytes; NULL:
 * they are bytes. scales: of one group, VECS vectors each. */
struct grouped {
    stretch_function single[FEW + 1], twice[FEW + 1];
    void (*unpack)(const char *panel, long k, long count, char *bytes);
    void (*scales)(const struct linear *job, const char *panel, long group, vec *scale, vec *offset);
    uint32_t middle;
};

INLINE const struct stretch_head *head_of(const struct span *s, long row) {
    return (const struct stretch_head *)(s->job->x + row * s->job->x_step) + s->index;
}

/* Where four inputs of a row are, so many behind the stretch's first. */
INLINE const char *four_inputs(const struct span *s, const char *row, long i) {
    return row + s->codes_at + (s->k + i) * (SUMS == 2 ? 1 : 2);
}

INLINE void begin_stretch(const int rows, const int vectors, const struct span *s, long row, word sum[TILE][2 * VECS][SUMS]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
#pragma GCC unroll 2
            for (int part = 0; part < SUMS; part++) sum[r][v][part] = spread_word(head_of(s, row + r)->start[part]);
}

/* Adds the products of four inputs of a row with so many vectors of words of weights. */
INLINE void dot_fixed(const int vectors, const word *w, const char *x, long inputs, word sum[2 * VECS][SUMS]) {
#if defined(DOT_VNNI)
    word high = spread_word(word_at(x)), low = spread_word(word_at(x + inputs));
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sum[v][0] = DOT(sum[v][0], w[v], high), sum[v][1] = DOT(sum[v][1], w[v], low);
#elif defined(DOT_PAIRS)
    (void)inputs;
    word even = spread_word(word_at(x)), odd = spread_word(word_at(x + 4));
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
        sum[v][0] += PAIRS(w[v] & spread_word(0x00ff00ff), even);
        sum[v][0] += PAIRS(w[v] >> 8 & spread_word(0x00ff00ff), odd);
    }
#else
    (void)inputs;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        word value = spread_word((uint32_t)(int32_t)((const int16_t *)x)[i % 2 * 2 + i / 2]);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[v][0] += (w[v] >> (8 * i) & spread_word(255)) * value;
    }
#endif
}

INLINE void end_stretch(const int rows, const int vectors, const struct span *s, long row, word sum[TILE][2 * VECS][SUMS], vec *sums) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const struct stretch_head *head = head_of(s, row + r);
        vec total = spread(head->total), unit = spread(head->unit);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            ivec exact = (ivec)(SUMS == 2 ? (sum[r][v][0] << 8) + sum[r][v][SUMS - 1] : sum[r][v][0]);
            vec moved = sums[r * vectors + v] + total * s->offset[v]; /* two multiply-adds, in this order */
            sums[r * vectors + v] = moved + __builtin_convertvector(exact, vec) * (unit * s->scale[v]);
        }
    }
}

INLINE void many_rows(const int rows, const struct span *s, long row, vec *sums) {
    const char *x = s->job->x + row * s->job->x_step;
    word sum[TILE][2 * VECS][SUMS];
    begin_stretch(rows, VECS, s, row, sum);
    for (long i = 0; i < s->count; i += 4) {
        word some[VECS];
        for (long at = 0; s->soon && at < s->soon_step; at += LINE) __builtin_prefetch(s->soon + i / 4 * s->soon_step + at, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) some[v] = load_words(s->bytes + (i / 4 * PANEL + v * LANES) * 4);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) dot_fixed(VECS, some, four_inputs(s, x + r * s->job->x_step, i), s->job->inputs, sum[r]);
    }
    end_stretch(rows, VECS, s, row, sum, sums);
}

#define MANY_ROWS(R) \
    static void many_##R(const struct span *s, long row, vec *sums) { many_rows(R <= TILE_GROUPED ? R : 1, s, row, sums); }
#define MANY_OF(R) many_##R,
EACH_COUNT(MANY_ROWS)
static const stretch_function many_of[] = {0, EACH_COUNT(MANY_OF)};

static void grouped_panels(const struct linear *job, long first, long rows, long p, long panels) {
    char bytes[STRETCH * PANEL] __attribute__((aligned(LINE)));
    vec sums[GROUPED_ROWS * VECS];
    const struct grouped *grouped = job->format->grouped;
    long tiles = ceil_div(rows, TILE_GROUPED), group = job->group, bits = job->format->bits;
    struct span s = {
        .job = job, .panel = job->weight + p * job->panel_bytes, .bytes = bytes, .soon_step = PANEL * bits / 2,
        .codes_at = grouped_head_bytes(job->inputs, group),
    };
    memset(sums, 0, rows * panels * VECS * sizeof(vec));
    for (long g = 0; g * group < job->inputs; g++) {
        for (long i = 0; i < panels; i++)
            grouped->scales(job, s.panel + i * job->panel_bytes, g, s.scale + i * VECS, s.offset + i * VECS);
        for (long begin = 0; begin < group; begin += STRETCH, s.index++) {
            s.k = g * group + begin;
            s.count = min_long(STRETCH, group - begin);
            if (rows <= FEW) {
                (panels == 2 ? grouped->twice : grouped->single)[rows](&s, first, sums);
                continue;
            }
            if (grouped->unpack) grouped->unpack(s.panel, s.k, s.count, bytes);
            else s.bytes = s.panel + s.k * PANEL;
            s.soon = s.panel + (s.k + s.count) * PANEL * bits / 8;
            for (long t = 0, at = 0; t < tiles; t++, s.soon = 0) {
                long some = (rows - at) / (tiles - t);
                many_of[some](&s, first + at, sums + at * VECS);
                at += some;
            }
        }
    }
    put_rows(job, first, rows, p * PANEL, panels * VECS, sums);
}

static void grouped_rows(const struct linear *job, long first, long last, long p, long end) {
    while (p < end) {
        long panels = last - first <= PAIR_ROWS && p + 1 < end ? 2 : 1;
        for (long at = first; at < last; at += GROUPED_ROWS) grouped_panels(job, at, min_long(GROUPED_ROWS, last - at), p, panels);
        p += panels;
    }
}

/* A kind of codes: WORDS words hold STEP inputs, [inputs / STEP][WORDS][PANEL]; KIND_four(words, i): inputs 4 i .. 4 i + 3 as bytes. */
#define CODES(KIND, STEP, WORDS) \
    INLINE void KIND##_words(const char *panel, long k, const int v, word *words) { \
        _Pragma("GCC unroll 8") for (int i = 0; i < WORDS; i++) \
            words[i] = load_words(panel + ((k / STEP * WORDS + i) * PANEL + v * LANES) * 4); \
    } \
    INLINE void KIND##_rows(const int rows, const int panels, const struct span *s, long row, vec *sums) { \
        const char *x = s->job->x + row * s->job->x_step; \
        word sum[TILE][2 * VECS][SUMS]; \
        begin_stretch(rows, panels * VECS, s, row, sum); \
        for (long k = 0; k < s->count; k += STEP) { \
            word words[2 * VECS][WORDS]; \
            _Pragma("GCC unroll 8") for (int v = 0; v < panels * VECS; v++) \
                KIND##_words(s->panel + v / VECS * s->job->panel_bytes, s->k + k, v % VECS, words[v]); \
            for (int panel = 0; panel < panels; panel++) \
                for (long at = 0; at < WORDS * PANEL * 4; at += LINE) \
                    __builtin_prefetch(s->panel + panel * s->job->panel_bytes + (s->k + k) / STEP * WORDS * PANEL * 4 + at + EARLY); \
            _Pragma("GCC unroll 8") for (int i = 0; i < STEP / 4; i++) { \
                word four[2 * VECS]; \
                _Pragma("GCC unroll 8") for (int v = 0; v < panels * VECS; v++) four[v] = KIND##_four(words[v], i); \
                _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) \
                    dot_fixed(panels * VECS, four, four_inputs(s, x + r * s->job->x_step, k + 4 * i), s->job->inputs, sum[r]); \
            } \
        } \
        end_stretch(rows, panels * VECS, s, row, sum, sums); \
    } \
    FEW_ROWS(KIND, 1, 1) FEW_ROWS(KIND, 1, 2) FEW_ROWS(KIND, 2, 1) FEW_ROWS(KIND, 2, 2) FEW_ROWS(KIND, 3, 1) \
    FEW_ROWS(KIND, 3, 2) \
    static __attribute__((unused)) void KIND##_unpack(const char *panel, long k, long count, char *out) { \
        for (long at = 0; at < count; at += STEP) \
            for (int v = 0; v < VECS; v++) { \
                word words[WORDS]; \
                KIND##_words(panel, k + at, v, words); \
                _Pragma("GCC unroll 8") for (int i = 0; i < STEP / 4; i++) { \
                    word four = KIND##_four(words, i); \
                    memcpy(out + ((at / 4 + i) * PANEL + v * LANES) * 4, &four, sizeof four); \
                } \
            } \
    }
#define FEW_ROWS(KIND, R, P) \
    static void KIND##_##R##_##P(const struct span *s, long row, vec *sums) { \
        KIND##_rows(P == 1 || R <= PAIR_ROWS ? R : 1, P, s, row, sums); \
    }
#define FEW_OF(KIND) \
    .single = {0, KIND##_1_1, KIND##_2_1, KIND##_3_1}, .twice = {0, KIND##_1_2, KIND##_2_2, KIND##_3_2}

/* The low four bits of four inputs: see pack_code. */
INLINE word low_four(const word *words, const int i) { return words[i / 2] >> (i % 2 * 4) & spread_word(0x0f0f0f0f); }

INLINE word nibble_four(const word *words, const int i) { return low_four(words, i); }
CODES(nibble, 8, 1)
INLINE word byte_four(const word *words, const int i) { return words[i]; }
CODES(byte, 8, 2)
INLINE word five_four(const word *words, const int i) { return low_four(words, i) | (words[4] >> i & spread_word(0x01010101)) << 4; }
CODES(five, 32, 5)
INLINE word six_four(const word *words, const int i) { return low_four(words, i) | (words[2] >> (2 * i) & spread_word(0x03030303)) << 4; }
CODES(six, 16, 3)

/* ---- scales ---- */

INLINE vec signed_bytes(const char *from) {
    return __builtin_convertvector(__builtin_convertvector((bytes) * (const bytes_unaligned *)from, ivec), vec);
}
/* float16, without infinity and NaN. */
typedef uint16_t shorts __attribute__((vector_size(LANES * 2)));
typedef uint16_t shorts_unaligned __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
INLINE vec halves(const char *from) {
    ivec half = __builtin_convertvector((shorts) * (const shorts_unaligned *)from, ivec);
    vec size = (vec)((half & 0x7fff) << 13) * spread(0x1p112f);
    return (vec)((ivec)size | (half & 0x8000) << 16);
}
typedef uint8_t naturals __attribute__((vector_size(LANES)));
typedef uint8_t naturals_unaligned __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE vec natural_bytes(const char *from) {
    return __builtin_convertvector(__builtin_convertvector((naturals) * (const naturals_unaligned *)from, ivec), vec);
}

/* Where element `index` of a plane lies, for vector v. */
INLINE const char *in_plane(const struct linear *job, const char *panel, int plane, long index, int v) {
    return panel + job->planes[plane] + (index * PANEL + v * LANES) * job->format->planes[plane].bytes;
}

/* int4: scales as floats, and 8 - zero as bytes. */
static void int4_scales(const struct linear *job, const char *panel, long group, vec *scale, vec *offset) {
    for (int v = 0; v < VECS; v++) {
        scale[v] = load((const float *)in_plane(job, panel, 0, group, v));
        offset[v] = scale[v] * signed_bytes(in_plane(job, panel, 1, group, v));
    }
}

/* GGUF, the formats' own names: codes less the middle of their range. Scales are float16; those of Q4_K and Q6_K are of 256 inputs,
 * and times a byte of each group. */
static void half_scales(const struct linear *job, const char *panel, long group, vec *scale, vec *offset) {
    for (int v = 0; v < VECS; v++) {
        scale[v] = halves(in_plane(job, panel, 0, group, v));
        offset[v] = (vec){0};
    }
}
static void q4_1_scales(const struct linear *job, const char *panel, long group, vec *scale, vec *offset) {
    for (int v = 0; v < VECS; v++) {
        scale[v] = halves(in_plane(job, panel, 0, group, v));
        offset[v] = scale[v] * spread(8.0f) + halves(in_plane(job, panel, 1, group, v));
    }
}
#define SUPER 256
static void q4_k_scales(const struct linear *job, const char *panel, long group, vec *scale, vec *offset) {
    for (int v = 0; v < VECS; v++) {
        long block = group * job->group / SUPER;
        scale[v] = halves(in_plane(job, panel, 0, block, v)) * natural_bytes(in_plane(job, panel, 2, group, v));
        offset[v] = scale[v] * spread(8.0f) - halves(in_plane(job, panel, 1, block, v)) * natural_bytes(in_plane(job, panel, 3, group, v));
    }
}
static void q6_k_scales(const struct linear *job, const char *panel, long group, vec *scale, vec *offset) {
    for (int v = 0; v < VECS; v++) {
        scale[v] = halves(in_plane(job, panel, 0, group * job->group / SUPER, v)) * signed_bytes(in_plane(job, panel, 1, group, v));
        offset[v] = (vec){0};
    }
}

/* ---- formats ---- */

#define GROUPED(NAME, KIND, UNPACK, SCALES, MIDDLE) \
    static const struct grouped NAME##_grouped = {FEW_OF(KIND), .unpack = UNPACK, .scales = SCALES, .middle = MIDDLE}; \
    static const struct format NAME##_format = {.rows = grouped_rows, .grouped = &NAME##_grouped, FORMAT_##NAME}
#define FORMAT_int4 .bits = 4, .whole = 8, .planes = {{4, GROUP}, {1, GROUP}}
#define FORMAT_q8_0 .bits = 8, .whole = 8, .planes = {{2, GROUP}}
#define FORMAT_q5_0 .bits = 5, .whole = 32, .planes = {{2, GROUP}}
#define FORMAT_q4_1 .bits = 4, .whole = 8, .planes = {{2, GROUP}, {2, GROUP}}
#define FORMAT_q4_k .bits = 4, .whole = 8, .planes = {{2, SUPER}, {2, SUPER}, {1, GROUP}, {1, GROUP}}
#define FORMAT_q6_k .bits = 6, .whole = 16, .planes = {{2, SUPER}, {1, GROUP}}
GROUPED(int4, nibble, nibble_unpack, int4_scales, 8);
GROUPED(q8_0, byte, 0, half_scales, 128);
GROUPED(q5_0, five, five_unpack, half_scales, 16);
GROUPED(q4_1, nibble, nibble_unpack, q4_1_scales, 8);
GROUPED(q4_k, nibble, nibble_unpack, q4_k_scales, 8);
GROUPED(q6_k, six, six_unpack, q6_k_scales, 32);

#endif
