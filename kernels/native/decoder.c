/* The layers of a Llama-like decoder in fp32 on the CPU, over rows (tokens) of many sequences at once.
 *
 * Compiled where it runs (see kernels/native/build.py) and called through ctypes: the structs below are mirrored in
 * kernels/native/api.py. No function allocates or keeps a pointer, and none fails but by `reduce` of struct model.
 */
#include "attention_tile.h"
#include "bf16.h"
#include "grouped.h"
#include "lora.h"
#include "narrow.h"
#include "pack.h"

#define EXPORT __attribute__((visibility("default")))
#define NORM_ROWS 16

enum activation { SILU, GELU_TANH };

enum weight_format { WEIGHTS_PLAIN, WEIGHTS_BFLOAT16, WEIGHTS_INT8, WEIGHTS_BF16 = 9 }; /* the others have groups */
static const struct format *const formats[] = {
    &plain_format, &narrow_format, &int8_format, &int4_format, &q8_0_format, &q5_0_format, &q4_1_format, &q4_k_format, &q6_k_format,
    &bf16_format,
};

/* A linear layer, or the first part of one whose outputs are kept in several formats. order: input order[k] of x meets input k of
 * the weights; NULL: as they are. lora: of the whole layer, in its first part; NULL: it has none. group: inputs that share a scale,
 * where the format has groups. */
struct weights {
    const char *packed;
    const float *bias;
    const int32_t *order;
    const struct weights *next;
    const struct lora *lora;
    int64_t format, group, outputs;
};

/* What a layer lacks is NULL. A post norm is taken of what attention, or the feed-forward part, adds to the row. */
struct layer {
    const float *input_norm, *q_norm, *k_norm, *post_attention_norm, *pre_feedforward_norm, *post_feedforward_norm;
    struct weights qkv, o, gate_up, down;
    const float *cosines, *sines;      /* [positions][head_dim / 2] */
    float *kv;                         /* K of block 0; its V lies block_size slots behind */
    int64_t block_step;                /* floats from one block to the next */
    int64_t group;                     /* of the step: whose blocks and slots are this layer's */
    int64_t window, activation;        /* window: tokens that a query sees; 0: all */
    float scale, softcap;              /* of the queries; of the scores, 0: none */
};

/* Tensor parallelism: x [rows][columns] is this rank's part of a sum, and becomes the sum of all ranks. Returns: 0, or that it
 * failed: then the step is given up at once. Called by the thread that called into this library, never by a helper. */
typedef int64_t (*reduce_function)(float *x, int64_t rows, int64_t columns);

/* Sizes: with ranks, those of this one. reduce: of what attention, and the feed-forward part, add to a row; NULL: there are no
 * ranks. */
struct model {
    const struct layer *layers;
    int64_t hidden, ffn, heads, kv_heads, head_dim, block_size, kv_codes; /* kv_codes: of enum kv_codes */
    float eps;
    reduce_function reduce;
};

/* blocks: the block tables, which may hold anything for blocks that lie before every window. slots: of kv, one for each row
 * of the step. */
struct group {
    const int64_t *blocks, *slots;
};

struct step {
    float *x, *normed, *qkv, *attended, *gate, *up; /* [rows][hidden, hidden, .., heads * head_dim, ffn, ffn] */
    const int64_t *positions, *tiles;
    const struct group *groups;
    float *scores;
    char *prepared; /* rows as the format of a layer reads them: prepared_bytes of the widest each */
    const struct team *teams; /* of the rows that have adapters */
    float *shrunk;  /* [rows][width of the widest layer], with teams; see lora.h */
    int64_t rows, num_tiles, num_teams, max_len, scores_step, num_threads;
};

INLINE vec norm_scale(const float *x, long size, float eps) {
    vec squares = {0};
    for (long i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    return spread(1.0f / sqrtf(sum_lanes(squares) / (float)size + eps));
}

INLINE void norm_row(const float *x, const float *weight, long size, float eps, float *y) {
    vec scale = norm_scale(x, size, eps);
    for (long i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

/* y = norm(x), after x += y with `add`, or x += norm of y where `post` is given; weight NULL: that is all. */
struct norm {
    float *x;
    const float *post, *weight;
    float *y;
    long rows, size;
    float eps;
    int add;
};

static void norm_task(const void *context, long task, int thread) {
    const struct norm *job = context;
    long size = job->size;
    (void)thread;
    for (long r = task * NORM_ROWS; r < min_long(job->rows, (task + 1) * NORM_ROWS); r++) {
        float *x = job->x + r * size, *y = job->y + r * size;
        if (job->post) {
            vec scale = norm_scale(y, size, job->eps);
            for (long i = 0; i < size; i += LANES) store(x + i, load(x + i) + load(y + i) * scale * load(job->post + i));
        } else if (job->add)
            for (long i = 0; i < size; i += LANES) store(x + i, load(x + i) + load(y + i));
        if (job->weight) norm_row(x, job->weight, size, job->eps, y);
    }
}

static void norm_run(const struct norm *job, int num_threads) {
    if (job->post || job->add || job->weight) run_tasks(norm_task, job, ceil_div(job->rows, NORM_ROWS), num_threads);
}

/* Bytes of a row of x as a format reads it. */
INLINE long row_bytes(long format, long inputs, long group) {
    if (format == WEIGHTS_PLAIN || format == WEIGHTS_BFLOAT16) return inputs * 4;
    if (format == WEIGHTS_BF16) return bf16_row_bytes(inputs);
    return format == WEIGHTS_INT8 ? int8_row_bytes(inputs) : grouped_row_bytes(inputs, group);
}

/* Rows in the form that a format reads, and what their adapters need beforehand: lora or NULL. */
struct preparation {
    const struct weights *weights;
    const struct rows *rows;
    const struct lora *lora;
    long step, shrinks;
};

static void prepare_task(const void *context, long task, int thread) {
    const struct preparation *job = context;
    const struct weights *w = job->weights;
    const struct rows *rows = job->rows;
    (void)thread;
    if (task < job->shrinks) {
        shrink(job->lora, rows, task);
        return;
    }
    task -= job->shrinks;
    for (long r = task * NORM_ROWS; r < min_long(rows->count, (task + 1) * NORM_ROWS); r++) {
        const float *from = rows->x + r * rows->inputs;
        char *to = rows->prepared + r * job->step;
        if (w->format == WEIGHTS_BF16) round_row(from, rows->inputs, to);
        else if (w->format == WEIGHTS_INT8) quantize_row(from, rows->inputs, to);
        else fix_row(from, w->order, rows->inputs, w->group, formats[w->format]->grouped->middle, to);
    }
}

/* Of a layer, or a part, with its rows prepared. */
static struct linear linear_of(const struct weights *w, const struct rows *rows, long outputs, float *y, long y_step, int add) {
    const struct format *format = formats[w->format];
    struct linear job = {
        .format = format, .x = (const char *)rows->x, .weight = w->packed, .bias = w->bias, .y = y, .rows = rows->count,
        .inputs = rows->inputs, .outputs = outputs, .group = w->group, .x_step = row_bytes(w->format, rows->inputs, w->group),
        .y_step = y_step, .add = add, .lora = rows->num_teams ? w->lora : 0, .teams = rows->teams, .shrunk = rows->shrunk,
        .num_teams = rows->num_teams,
    };
    job.panel_bytes = lay_out_panel(format, rows->inputs, w->group, job.planes);
    struct preparation preparation = {w, rows, job.lora, job.x_step, job.lora ? num_shrinks(job.lora, rows) : 0};
    int prepares = w->format != WEIGHTS_PLAIN && w->format != WEIGHTS_BFLOAT16;
    long tasks = preparation.shrinks + (prepares ? ceil_div(rows->count, NORM_ROWS) : 0);
    if (tasks) run_tasks(prepare_task, &preparation, tasks, rows->threads);
    if (prepares) job.x = rows->prepared;
    return job;
}

/* y (+)= x W^T + bias, of all parts one after the other. y: [rows][y_step] */
static void apply(const struct weights *w, const struct rows *rows, float *y, long y_step, int add) {
    const struct lora *lora = 0;
    for (long column = 0; w; column += w->outputs, w = w->next) {
        struct linear job = linear_of(w, rows, w->outputs, y + column, y_step, add);
        if (!column) lora = job.lora;
        job.lora = lora, job.lora_column = column;
        linear_run(&job, rows->threads);
    }
}

static struct rows rows_of(const struct step *s, const float *x, long inputs) {
    return (struct rows){x, s->prepared, s->teams, s->shrunk, s->rows, s->num_teams, inputs, (int)s->num_threads};
}

/* y = x W^T + bias is added to the step's rows, or with a post norm or ranks left in `normed`, for norm_task to add. Returns:
 * see reduce_function. */
static int64_t project(const struct model *m, const struct step *s, const float *x, long inputs, const struct weights *w,
                       const float *post) {
    struct rows rows = rows_of(s, x, inputs);
    int later = post || m->reduce;
    apply(w, &rows, later ? s->normed : s->x, m->hidden, !later);
    return m->reduce && rows.count ? m->reduce(s->normed, rows.count, m->hidden) : 0;
}

struct turn {
    const struct model *model;
    const struct step *step;
    const struct layer *layer;
};

/* Halves, as Hugging Face checkpoints expect. */
INLINE void rotate(float *x, const float *cosine, const float *sine, long half) {
    for (long i = 0; i < half; i += LANES) {
        vec left = load(x + i), right = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, left * c - right * s);
        store(x + half + i, right * c + left * s);
    }
}

static void turn_task(const void *context, long task, int thread) {
    const struct turn *job = context;
    const struct model *m = job->model;
    const struct layer *layer = job->layer;
    long dim = m->head_dim, half = dim / 2, kv_size = m->kv_heads * dim, all = m->heads + 2 * m->kv_heads;
    long slot = slot_floats(m->kv_codes, m->kv_heads, dim);
    (void)thread;
    for (long r = task * NORM_ROWS; r < min_long(job->step->rows, (task + 1) * NORM_ROWS); r++) {
        float *row = job->step->qkv + r * all * dim, *k = row + m->heads * dim;
        const float *cosine = layer->cosines + job->step->positions[r] * half;
        const float *sine = layer->sines + job->step->positions[r] * half;
        for (long h = 0; h < m->heads + m->kv_heads; h++) {
            const float *weight = h < m->heads ? layer->q_norm : layer->k_norm;
            if (weight) norm_row(row + h * dim, weight, dim, m->eps, row + h * dim);
            rotate(row + h * dim, cosine, sine, half);
        }
        float *to = layer->kv + job->step->groups[layer->group].slots[r] * slot, *v_to = to + m->block_size * slot;
        if (m->kv_codes == FLOATS) {
            memcpy(to, k, kv_size * sizeof(float));
            memcpy(v_to, k + kv_size, kv_size * sizeof(float));
        } else {
            encode_slot(m->kv_codes, k, m->kv_heads, dim, to);
            encode_slot(m->kv_codes, k + kv_size, m->kv_heads, dim, v_to);
        }
    }
}

static void attention_part(const struct model *m, long index, const struct step *s) {
    const struct layer *layer = &m->layers[index];
    long dim = m->head_dim, all = (m->heads + 2 * m->kv_heads) * dim;
    long slot = slot_floats(m->kv_codes, m->kv_heads, dim);
    int threads = (int)s->num_threads;
    struct norm norm = {s->x, 0, layer->input_norm, s->normed, s->rows, m->hidden, m->eps, 0};
    norm_run(&norm, threads);
    struct rows normed = rows_of(s, s->normed, m->hidden);
    apply(&layer->qkv, &normed, s->qkv, all, 0);
    struct turn turn = {m, s, layer};
    run_tasks(turn_task, &turn, ceil_div(s->rows, NORM_ROWS), threads);
    struct attention attention = {
        .pool = layer->kv,
        .q = s->qkv,
        .out = s->attended,
        .tiles = s->tiles,
        .blocks = s->groups[layer->group].blocks,
        .scores = s->scores,
        .scores_step = s->scores_step,
        .whole_rows = s->num_tiles >= 2 * s->num_threads,
        .num_tiles = s->num_tiles,
        .block_step = layer->block_step,
        .v_offset = m->block_size * slot,
        .codes = m->kv_codes,
        .slot = slot,
        .block_size = m->block_size,
        .kv_heads = m->kv_heads,
        .group = m->heads / m->kv_heads,
        .head_dim = dim,
        .q_step = all,
        .out_step = m->heads * dim,
        .max_len = s->max_len,
        .window = layer->window,
        .scale = layer->scale,
        .softcap = layer->softcap,
    };
    run_tasks(attend_task, &attention, s->num_tiles * m->kv_heads, threads);
}

INLINE vec silu_lanes(vec x) { return x / (spread(1.0f) + exp_lanes(-x)); }

/* x / 2 (1 + tanh u) = x / (1 + e^-2u) */
INLINE vec gelu_tanh_lanes(vec x) {
    vec u = spread(0.7978845608f) * (x + spread(0.044715f) * x * x * x);
    return x / (spread(1.0f) + exp_lanes(-(u + u)));
}

struct feed {
    struct linear gate, up;
    int64_t activation;
};

static void feed_task(const void *context, long task, int thread) {
    const struct feed *job = context;
    struct share share = share_of(&job->gate, task);
    long outputs = job->gate.outputs, size = job->gate.panel_bytes;
    (void)thread;
    linear_share(&job->gate, share, job->up.weight + share.p * size);
    linear_share(&job->up, share, job->gate.weight + share.end * size);
    add_adapters(&job->gate, share);
    add_adapters(&job->up, share);
    for (long r = share.first; r < share.last; r++) {
        float *gate = job->gate.y + r * outputs, *up = job->up.y + r * outputs;
        long end = min_long(outputs, share.end * PANEL);
        if (job->activation == GELU_TANH)
            for (long i = share.p * PANEL; i < end; i += LANES) store(gate + i, gelu_tanh_lanes(load(gate + i)) * load(up + i));
        else
            for (long i = share.p * PANEL; i < end; i += LANES) store(gate + i, silu_lanes(load(gate + i)) * load(up + i));
    }
}

/* Returns: see reduce_function. */
static int64_t feed_part(const struct model *m, long index, const struct step *s) {
    const struct layer *layer = &m->layers[index];
    long hidden = m->hidden, ffn = m->ffn, rows = s->rows;
    int threads = (int)s->num_threads, add = m->reduce != 0;
    int64_t failed = project(m, s, s->attended, m->heads * m->head_dim, &layer->o, layer->post_attention_norm);
    if (failed) return failed;
    struct norm before = {s->x, layer->post_attention_norm, layer->pre_feedforward_norm, s->normed, rows, hidden, m->eps, add};
    norm_run(&before, threads);
    struct rows normed = rows_of(s, s->normed, hidden);
    struct linear gate = linear_of(&layer->gate_up, &normed, ffn, s->gate, ffn, 0), up = gate;
    up.weight += num_panels(ffn) * gate.panel_bytes;
    if (gate.bias) up.bias += ffn;
    up.y = s->up;
    up.lora_column = ffn;
    struct feed feed = {gate, up, layer->activation};
    run_tasks(feed_task, &feed, num_shares(&feed.gate), threads);
    failed = project(m, s, s->gate, ffn, &layer->down, layer->post_feedforward_norm);
    if (failed) return failed;
    struct norm after = {s->x, layer->post_feedforward_norm, 0, s->normed, rows, hidden, m->eps, add};
    norm_run(&after, threads);
    return 0;
}

/* ---- what Python calls ---- */

EXPORT int64_t diptych_panel(void) { return PANEL; }
EXPORT int64_t diptych_tile(void) { return TILE; }
EXPORT int64_t diptych_lanes(void) { return LANES; }
EXPORT int64_t diptych_tile_rows(int64_t group) { return tile_rows(group); }

/* Of the structs that Python fills. */
EXPORT int64_t diptych_struct_size(int64_t which) {
    const int64_t sizes[] = {
        sizeof(struct weights), sizeof(struct layer), sizeof(struct model), sizeof(struct group), sizeof(struct step),
        sizeof(struct lora), sizeof(struct adapter), sizeof(struct team),
    };
    return sizes[which];
}

/* Bytes of packed weights, and of a prepared row. */
EXPORT int64_t diptych_packed_bytes(int64_t format, int64_t outputs, int64_t inputs, int64_t group) {
    long planes[MAX_PLANES];
    return num_panels(outputs) * lay_out_panel(formats[format], inputs, group, planes);
}
EXPORT int64_t diptych_prepared_bytes(const struct weights *w, int64_t inputs) {
    long most = 0;
    for (; w; w = w->next) most = max_long(most, row_bytes(w->format, inputs, w->group));
    return most;
}

/* codes: [outputs][inputs] of the least whole bytes that hold a format's bits, each of which becomes code ^ flip; out:
 * packed_bytes, in which every plane is 0 then. */
EXPORT void diptych_pack_codes(int64_t format, const void *codes, int64_t outputs, int64_t inputs, int64_t group, int64_t flip,
                               char *out) {
    pack_codes(formats[format], codes, outputs, inputs, group, (uint32_t)flip, out);
}

/* values: [outputs][inputs / those that share one], of the plane's bytes. */
EXPORT void diptych_pack_plane(int64_t format, int64_t plane, const void *values, int64_t outputs, int64_t inputs, int64_t group,
                               char *out) {
    pack_plane(formats[format], (int)plane, values, outputs, inputs, group, out);
}

/* See use_tiles. */
EXPORT int64_t diptych_use_tiles(int64_t wanted) { return use_tiles((int)wanted); }

/* Layers [first, last) of the step. Returns: see reduce_function. */
EXPORT int64_t diptych_layers(const struct model *model, const struct step *step, int64_t first, int64_t last) {
    int64_t failed = 0;
    for (long index = first; index < last && !failed; index++) {
        attention_part(model, index, step);
        failed = feed_part(model, index, step);
    }
    return failed;
}

/* The last layer in two halves: between them the rows whose logits nobody wants drop out. */
EXPORT void diptych_attention_part(const struct model *model, const struct step *step, int64_t index) {
    attention_part(model, index, step);
}
/* Returns: see reduce_function. */
EXPORT int64_t diptych_feed_part(const struct model *model, const struct step *step, int64_t index) {
    return feed_part(model, index, step);
}

EXPORT void diptych_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t size, float eps) {
    for (long r = 0; r < rows; r++) norm_row(x + r * size, weight, size, eps, y + r * size);
}

/* values[i] = cap * tanh(values[i] / cap), in place: each as if it were alone. */
EXPORT void diptych_softcap(float *values, int64_t count, float cap) { cap_values(values, count, cap); }

/* y: [rows][outputs of all parts] = x W^T + bias. prepared: [rows][prepared_bytes]; teams, shrunk: see struct step. */
EXPORT void diptych_linear(const struct weights *weights, const float *x, char *prepared, const struct team *teams, float *shrunk,
                           float *y, int64_t rows, int64_t num_teams, int64_t inputs, int64_t outputs, int64_t num_threads) {
    struct rows some = {x, prepared, teams, shrunk, rows, num_teams, inputs, (int)num_threads};
    apply(weights, &some, y, outputs, 0);
}
