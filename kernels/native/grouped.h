/* Weights that are codes of a few bits, with a scale (and an offset) for each group of inputs, times floats:
 *
 *     y = sum over the groups of (sum of x) * offset + (sum of x * code) * scale
 *
 * A group is taken in stretches of at most STRETCH inputs. A row's sum over a stretch is one chain of fused multiply-adds in the
 * inputs' order, and the stretches follow each other in theirs: a result depends neither on the rows beside it nor on the width of
 * vectors. A few rows unpack codes as they meet them; more than FEW share codes that were unpacked to floats once.
 */
#ifndef DIPTYCH_GROUPED_H
#define DIPTYCH_GROUPED_H

#include "int8.h"

#define STRETCH 128
#define GROUPED_ROWS 96 /* that share what was unpacked */
#define SUM_LANES 16    /* of the sum of x over a stretch, whatever the width of vectors */

#define FEW 3
#define EARLY 8192      /* bytes of codes that are asked for before a few rows meet them */

/* Rows from `row` on over one stretch of one or two panels. */
struct span {
    const struct linear *job;
    const char *panel;
    const float *codes; /* [panels][STRETCH][PANEL], for more than FEW rows */
    const char *soon;   /* what is read next: soon_step bytes of it are asked for beside every input, for more than FEW rows */
    long k, count, index, head_bytes, soon_step;
    int carry;          /* one chain over all stretches */
    vec scale[2 * VECS], offset[2 * VECS];
};
typedef void (*stretch_function)(const struct span *s, long row, vec *sums);

/* single, twice: up to FEW rows with one panel, and with two. unpack: codes of inputs [k, k + count) of a panel as [count][PANEL].
 * scales: of one group, VECS vectors each; NULL: codes are the weights, and all inputs are one chain. */
struct codes {
    stretch_function single[FEW + 1], twice[FEW + 1];
    void (*unpack)(const char *panel, long k, long count, float *codes);
};
struct grouped {
    const struct codes *codes;
    void (*scales)(const struct linear *job, const char *panel, long group, vec *scale, vec *offset);
};

/* ---- a row: the sums of its stretches, then its inputs, in the order of the codes ---- */

INLINE long num_stretches(long inputs, long group) { return inputs / group * ceil_div(group, STRETCH); }
INLINE long grouped_head_bytes(long inputs, long group) { return whole_lines(num_stretches(inputs, group) * 4); }
INLINE long grouped_row_bytes(long inputs, long group) { return grouped_head_bytes(inputs, group) + whole_lines(inputs * 4); }

/* count: a multiple of SUM_LANES. */
INLINE float stretch_sum(const float *x, long count) {
    float part[SUM_LANES];
    vec lanes[SUM_LANES / LANES] = {0};
    for (long k = 0; k < count; k += SUM_LANES)
        for (int i = 0; i < SUM_LANES / LANES; i++) lanes[i] += load(x + k + i * LANES);
    memcpy(part, lanes, sizeof part);
    for (int half = SUM_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* sums: whether they are wanted. */
static void group_row(const float *x, const int32_t *order, long inputs, long group, int sums, char *to) {
    float *sum = (float *)to, *row = (float *)(to + grouped_head_bytes(inputs, group));
    if (order)
        for (long k = 0; k < inputs; k++) row[k] = x[order[k]];
    else memcpy(row, x, inputs * sizeof(float));
    for (long begin = 0; sums && begin < inputs; begin += group)
        for (long k = 0; k < group; k += STRETCH) *sum++ = stretch_sum(row + begin + k, min_long(STRETCH, group - k));
}

/* ---- rows over one stretch ---- */

INLINE const float *row_of(const struct span *s, long row) {
    return (const float *)(s->job->x + row * s->job->x_step + s->head_bytes) + s->k;
}

INLINE void begin_stretch(const int rows, const int vectors, const struct span *s, vec sum[TILE][2 * VECS], const vec *sums) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = s->carry ? sums[r * vectors + v] : (vec){0};
}

INLINE void end_stretch(const int rows, const int vectors, const struct span *s, long row, vec sum[TILE][2 * VECS], vec *sums) {
    vec done[TILE * 2 * VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) done[r * vectors + v] = sum[r][v];
    if (s->carry) {
        memcpy(sums, done, rows * vectors * sizeof(vec));
        return;
    }
    for (long r = 0; r < rows; r++) {
        vec total = spread(((const float *)(s->job->x + (row + r) * s->job->x_step))[s->index]);
        for (long v = 0; v < vectors; v++) { /* two multiply-adds, in this order */
            vec moved = sums[r * vectors + v] + total * s->offset[v];
            sums[r * vectors + v] = moved + done[r * vectors + v] * s->scale[v];
        }
    }
}

INLINE void many_rows(const int rows, const struct span *s, long row, vec *sums) {
    const float *x = row_of(s, row);
    long x_step = s->job->x_step / 4;
    vec sum[TILE][2 * VECS];
    begin_stretch(rows, VECS, s, sum, sums);
    for (long k = 0; k < s->count; k++) {
        vec code[VECS];
        if (s->soon) __builtin_prefetch(s->soon + k * s->soon_step, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) code[v] = load(s->codes + k * PANEL + v * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec value = spread(x[r * x_step + k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] += value * code[v];
        }
    }
    end_stretch(rows, VECS, s, row, sum, sums);
}

#define MANY_ROWS(R) \
    static void many_##R(const struct span *s, long row, vec *sums) { many_rows(R, s, row, sums); }
#define MANY_OF(R) many_##R,
EACH_COUNT(MANY_ROWS)
static const stretch_function many_of[] = {0, EACH_COUNT(MANY_OF)};

static void grouped_panels(const struct linear *job, long first, long rows, long p, long panels) {
    float codes[STRETCH * PANEL] __attribute__((aligned(LINE)));
    vec sums[GROUPED_ROWS * VECS];
    const struct grouped *grouped = job->format->grouped;
    long tiles = rows <= FEW ? 1 : ceil_div(rows, TILE), group = job->group, step = PANEL * job->format->bits / 8;
    struct span s = {
        .job = job, .panel = job->weight + p * job->panel_bytes, .codes = codes, .soon_step = step, .carry = !grouped->scales,
        .head_bytes = grouped_head_bytes(job->inputs, group),
    };
    memset(sums, 0, rows * panels * VECS * sizeof(vec));
    for (long g = 0; g * group < job->inputs; g++) {
        for (long i = 0; grouped->scales && i < panels; i++)
            grouped->scales(job, s.panel + i * job->panel_bytes, g, s.scale + i * VECS, s.offset + i * VECS);
        for (long begin = 0; begin < group; begin += STRETCH, s.index++) {
            s.k = g * group + begin;
            s.count = min_long(STRETCH, group - begin);
            if (rows <= FEW) {
                (panels == 2 ? grouped->codes->twice : grouped->codes->single)[rows](&s, first, sums);
                continue;
            }
            grouped->codes->unpack(s.panel, s.k, s.count, codes);
            s.soon = s.panel + (s.k + s.count) * step;
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
        long panels = last - first <= FEW && p + 1 < end ? 2 : 1;
        for (long at = first; at < last; at += GROUPED_ROWS) grouped_panels(job, at, min_long(GROUPED_ROWS, last - at), p, panels);
        p += panels;
    }
}

/* A kind of codes. From the words of STEP inputs:
 *
 *     KIND_words(panel, k, v, words)   those of inputs [k, k + STEP) in vector v
 *     KIND_code(words, i)              code of input k + i, as floats
 */
#define CODES(KIND, STEP, WORDS) \
    INLINE void KIND##_rows(const int rows, const int panels, const struct span *s, long row, vec *sums) { \
        const float *x = row_of(s, row); \
        long x_step = s->job->x_step / 4; \
        vec sum[TILE][2 * VECS]; \
        begin_stretch(rows, panels * VECS, s, sum, sums); \
        for (long k = 0; k < s->count; k += STEP) { \
            word words[2 * VECS][WORDS]; \
            _Pragma("GCC unroll 8") for (int v = 0; v < panels * VECS; v++) \
                KIND##_words(s->panel + v / VECS * s->job->panel_bytes, s->k + k, v % VECS, words[v]); \
            for (int panel = 0; panel < panels; panel++) \
                for (long at = 0; at < WORDS * PANEL * 4; at += LINE) \
                    __builtin_prefetch(s->panel + panel * s->job->panel_bytes + (s->k + k) / STEP * WORDS * PANEL * 4 + at + EARLY); \
            _Pragma("GCC unroll 32") for (int i = 0; i < STEP; i++) { \
                vec code[2 * VECS]; \
                _Pragma("GCC unroll 8") for (int v = 0; v < panels * VECS; v++) code[v] = KIND##_code(words[v], i); \
                _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) { \
                    vec value = spread(x[r * x_step + k + i]); \
                    _Pragma("GCC unroll 8") for (int v = 0; v < panels * VECS; v++) sum[r][v] += value * code[v]; \
                } \
            } \
        } \
        end_stretch(rows, panels * VECS, s, row, sum, sums); \
    } \
    FEW_ROWS(KIND, 1, 1) FEW_ROWS(KIND, 1, 2) FEW_ROWS(KIND, 2, 1) FEW_ROWS(KIND, 2, 2) FEW_ROWS(KIND, 3, 1) \
    FEW_ROWS(KIND, 3, 2) \
    static void KIND##_unpack(const char *panel, long k, long count, float *codes) { \
        for (long at = 0; at < count; at += STEP) \
            for (int v = 0; v < VECS; v++) { \
                word words[WORDS]; \
                KIND##_words(panel, k + at, v, words); \
                _Pragma("GCC unroll 32") for (int i = 0; i < STEP; i++) \
                    store(codes + (at + i) * PANEL + v * LANES, KIND##_code(words, i)); \
            } \
    } \
    static const struct codes KIND##_codes = {{0, KIND##_1_1, KIND##_2_1, KIND##_3_1}, {0, KIND##_1_2, KIND##_2_2, KIND##_3_2}, KIND##_unpack};
#define FEW_ROWS(KIND, R, P) \
    static void KIND##_##R##_##P(const struct span *s, long row, vec *sums) { KIND##_rows(R, P, s, row, sums); }

/* WORDS words hold STEP inputs: [inputs / STEP][WORDS][PANEL]. */
INLINE void load_step(const char *panel, long k, const int v, const int step, const int count, word *words) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) words[i] = load_words(panel + ((k / step * count + i) * PANEL + v * LANES) * 4);
}
/* `bits` bits from bit `at` on, with their sign. */
INLINE vec signed_bits(word w, const int at, const int bits) {
    return __builtin_convertvector((ivec)(w << (32 - bits - at)) >> (32 - bits), vec);
}

/* bfloat16: two in a word, which is exact. */
INLINE void bfloat_words(const char *panel, long k, const int v, word *words) { load_step(panel, k, v, 2, 1, words); }
INLINE vec bfloat_code(const word *words, const int i) { return (vec)(i ? *words & spread_word(0xffff0000) : *words << 16); }
CODES(bfloat, 2, 1)

/* Eight of four bits, -8 to 7. */
INLINE void four_words(const char *panel, long k, const int v, word *words) { load_step(panel, k, v, 8, 1, words); }
INLINE vec four_code(const word *words, const int i) {
#if LANES == 16 && defined(__AVX512F__)
    const vec table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    return (vec)_mm512_permutexvar_ps((__m512i)(*words >> (4 * i)), (__m512)table);
#else
    return signed_bits(*words, 4 * i, 4);
#endif
}
CODES(four, 8, 1)

typedef int8_t bytes_unaligned __attribute__((vector_size(LANES), aligned(1), may_alias));
INLINE ivec signed_bytes(const char *from) { return __builtin_convertvector((bytes) * (const bytes_unaligned *)from, ivec); }

/* Eight bits. */
INLINE void eight_words(const char *panel, long k, const int v, word *words) { load_step(panel, k, v, 4, 1, words); }
INLINE vec eight_code(const word *words, const int i) { return signed_bits(*words, 8 * i, 8); }
CODES(eight, 4, 1)

/* Five bits: six in a word, whose last two bits are a part of the last two of 32. */
INLINE void five_words(const char *panel, long k, const int v, word *words) { load_step(panel, k, v, 32, 5, words); }
INLINE vec five_code(const word *words, const int i) {
    if (i < 30) return signed_bits(words[i / 6], i % 6 * 5, 5);
    const int from = (i - 30) * 2;
    word low = (words[from] >> 30) | (words[from + 1] >> 30 << 2);
    return signed_bits(low | (words[4] >> i & spread_word(1)) << 4, 0, 5);
}
CODES(five, 32, 5)

/* Six bits: five in a word, and the last of 16 in the last two bits of three. */
INLINE void six_words(const char *panel, long k, const int v, word *words) { load_step(panel, k, v, 16, 3, words); }
INLINE vec six_code(const word *words, const int i) {
    if (i < 15) return signed_bits(words[i / 5], i % 5 * 6, 6);
    return signed_bits((words[0] >> 30) | (words[1] >> 30 << 2) | (words[2] >> 30 << 4), 0, 6);
}
CODES(six, 16, 3)

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

/* ---- formats ---- */

/* Where element `index` of a plane lies, for vector v. */
INLINE const char *in_plane(const struct linear *job, const char *panel, int plane, long index, int v) {
    return panel + job->planes[plane] + (index * PANEL + v * LANES) * job->format->planes[plane].bytes;
}

/* int4: scales as floats, and 8 - zero as bytes. */
static void int4_scales(const struct linear *job, const char *panel, long group, vec *scale, vec *offset) {
    for (int v = 0; v < VECS; v++) {
        scale[v] = load((const float *)in_plane(job, panel, 0, group, v));
        offset[v] = scale[v] * __builtin_convertvector(signed_bytes(in_plane(job, panel, 1, group, v)), vec);
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
        vec byte = __builtin_convertvector(signed_bytes(in_plane(job, panel, 1, group, v)), vec);
        scale[v] = halves(in_plane(job, panel, 0, group * job->group / SUPER, v)) * byte;
        offset[v] = (vec){0};
    }
}

static const struct grouped int4_grouped = {&four_codes, int4_scales}, bfloat_grouped = {&bfloat_codes, 0}, q8_0_grouped = {&eight_codes, half_scales},
                            q5_0_grouped = {&five_codes, half_scales}, q4_1_grouped = {&four_codes, q4_1_scales},
                            q4_k_grouped = {&four_codes, q4_k_scales}, q6_k_grouped = {&six_codes, q6_k_scales};
static const struct format q8_0_format = {.grouped = &q8_0_grouped, .bits = 8, .whole = 4, .planes = {{2, GROUP}}};
static const struct format q5_0_format = {.grouped = &q5_0_grouped, .bits = 5, .whole = 32, .planes = {{2, GROUP}}};
static const struct format q4_1_format = {.grouped = &q4_1_grouped, .bits = 4, .whole = 8, .planes = {{2, GROUP}, {2, GROUP}}};
static const struct format q4_k_format = {
    .grouped = &q4_k_grouped, .bits = 4, .whole = 8, .planes = {{2, SUPER}, {2, SUPER}, {1, GROUP}, {1, GROUP}},
};
static const struct format q6_k_format = {.grouped = &q6_k_grouped, .bits = 6, .whole = 16, .planes = {{2, SUPER}, {1, GROUP}}};
static const struct format int4_format = {.grouped = &int4_grouped, .bits = 4, .whole = 8, .planes = {{4, GROUP}, {1, GROUP}}};
static const struct format bfloat_format = {.grouped = &bfloat_grouped, .bits = 16, .whole = 2};

/* ---- packing ---- */

/* Value k of an output's codes. Of five and six bits the last of a step lie in what the words' others leave. */
INLINE void pack_code(char *panel, long lane, long k, long bits, uint32_t value) {
    long words = bits == 5 ? 5 : bits == 6 ? 3 : 1, step = words * 32 / bits, in_word = 32 / bits, i = k % step;
    uint32_t *to = (uint32_t *)panel + k / step * words * PANEL + lane;
    if (i < words * in_word) to[i / in_word * PANEL] |= value << (i % in_word * bits);
    else if (bits == 6)
        for (int part = 0; part < 3; part++) to[part * PANEL] |= (value >> (2 * part) & 3) << 30;
    else {
        long from = (i - 30) * 2;
        to[from * PANEL] |= (value & 3) << 30;
        to[(from + 1) * PANEL] |= (value >> 2 & 3) << 30;
        to[4 * PANEL] |= (value >> 4) << i;
    }
}

INLINE uint32_t code_of(const void *codes, long size, long at) {
    if (size == 4) return ((const uint32_t *)codes)[at];
    return size == 2 ? ((const uint16_t *)codes)[at] : ((const uint8_t *)codes)[at];
}

#define PACKED_AT_ONCE 64 /* of an output: whole cache lines are read, and what is written stays in the first cache */

/* Panel by panel; `bits` and `size` are constants of the caller, so that places in words are shifts. */
INLINE void pack_panels(const void *codes, long size, long bits, long outputs, long inputs, long all, uint32_t flip, long panel_bytes, char *out) {
    uint32_t mask = bits == 32 ? UINT32_MAX : (1u << bits) - 1;
    for (long first = 0; first < outputs; first += PANEL, out += panel_bytes)
        for (long begin = 0; begin < all; begin += PACKED_AT_ONCE)
            for (long lane = 0; lane < PANEL; lane++) {
                long end = min_long(begin + PACKED_AT_ONCE, all), column = first + lane, there = column < outputs ? min_long(end, inputs) : begin, k = begin;
                for (; k < there; k++) pack_code(out, lane, k, bits, (code_of(codes, size, column * inputs + k) ^ flip) & mask);
                for (; k < end; k++) pack_code(out, lane, k, bits, flip & mask);
            }
}

/* codes: [outputs][inputs], of whole bytes; `flip` is added to each without a carry, and so it is for inputs that there are not. */
static void pack_codes(const struct format *format, const void *codes, long outputs, long inputs, long group, uint32_t flip, char *out) {
    long planes[MAX_PLANES], panel_bytes = lay_out_panel(format, inputs, group, planes);
    long all = ceil_div(inputs, format->whole) * format->whole;
    memset(out, 0, num_panels(outputs) * panel_bytes);
#define OF_BITS(BITS, SIZE) \
    case BITS: pack_panels(codes, SIZE, BITS, outputs, inputs, all, flip, panel_bytes, out); break
    switch (format->bits) {
        OF_BITS(4, 1);
        OF_BITS(5, 1);
        OF_BITS(6, 1);
        OF_BITS(8, 1);
        OF_BITS(16, 2);
        OF_BITS(32, 4);
    }
#undef OF_BITS
}

/* values: [outputs][as many as an output has]. */
static void pack_plane(const struct format *format, int index, const char *values, long outputs, long inputs, long group, char *out) {
    long planes[MAX_PLANES], panel_bytes = lay_out_panel(format, inputs, group, planes);
    long size = format->planes[index].bytes, count = plane_size(&format->planes[index], inputs, group);
    for (long column = 0; column < outputs; column++)
        for (long i = 0; i < count; i++) {
            char *to = out + column / PANEL * panel_bytes + planes[index] + (i * PANEL + column % PANEL) * size;
            memcpy(to, values + (column * count + i) * size, size);
        }
}

#endif
