/* The layers of a Llama-like decoder in fp32 on the CPU, over rows (tokens) of many sequences at once.
 *
 * Compiled where it runs (see kernels/native/build.py) and called through ctypes: the structs below are mirrored in
 * kernels/native/api.py. No function allocates, keeps a pointer or fails.
 */
#include "attention_tile.h"

#define EXPORT __attribute__((visibility("default")))
#define NORM_ROWS 16

struct layer {
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
    int64_t window;
};

struct model {
    const struct layer *layers;
    float *pool;
    const float *cosines, *sines; /* [positions][head_dim / 2] */
    int64_t num_layers, hidden, ffn, heads, kv_heads, head_dim, block_size;
    float eps, scale;
};

struct step {
    float *x, *normed, *qkv, *attended, *gate, *up; /* [rows][hidden, hidden, .., heads * head_dim, ffn, ffn] */
    const int64_t *positions, *slots, *tiles, *blocks;
    float *scores;
    int64_t rows, num_tiles, max_len, scores_step, num_threads;
};

INLINE void norm_row(const float *x, const float *weight, long size, float eps, float *y) {
    vec squares = {0};
    for (long i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    vec scale = spread(1.0f / sqrtf(sum_lanes(squares) / (float)size + eps));
    for (long i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

struct norm {
    const float *x, *weight;
    float *y;
    long rows, size;
    float eps;
};

static void norm_task(const void *context, long task, int thread) {
    const struct norm *job = context;
    (void)thread;
    for (long r = task * NORM_ROWS; r < min_long(job->rows, (task + 1) * NORM_ROWS); r++)
        norm_row(job->x + r * job->size, job->weight, job->size, job->eps, job->y + r * job->size);
}

static void norm_rows(const float *x, const float *weight, float *y, long rows, long size, float eps, int num_threads) {
    struct norm job = {x, weight, y, rows, size, eps};
    run_tasks(norm_task, &job, ceil_div(rows, NORM_ROWS), num_threads);
}

struct turn {
    const struct model *model;
    const struct step *step;
    long layer;
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
    const struct layer *layer = &m->layers[job->layer];
    long dim = m->head_dim, half = dim / 2, kv_size = m->kv_heads * dim, all = m->heads + 2 * m->kv_heads;
    (void)thread;
    for (long r = task * NORM_ROWS; r < min_long(job->step->rows, (task + 1) * NORM_ROWS); r++) {
        float *row = job->step->qkv + r * all * dim, *k = row + m->heads * dim;
        const float *cosine = m->cosines + job->step->positions[r] * half;
        const float *sine = m->sines + job->step->positions[r] * half;
        for (long h = 0; h < m->heads + m->kv_heads; h++) {
            const float *weight = h < m->heads ? layer->q_norm : layer->k_norm;
            if (weight) norm_row(row + h * dim, weight, dim, m->eps, row + h * dim);
            rotate(row + h * dim, cosine, sine, half);
        }
        float *to = m->pool + (2 * job->layer * m->block_size + job->step->slots[r]) * kv_size;
        memcpy(to, k, kv_size * sizeof(float));
        memcpy(to + m->block_size * kv_size, k + kv_size, kv_size * sizeof(float));
    }
}

static void attention_part(const struct model *m, long index, const struct step *s) {
    const struct layer *layer = &m->layers[index];
    long dim = m->head_dim, kv_size = m->kv_heads * dim, all = m->heads * dim + 2 * kv_size;
    int threads = (int)s->num_threads;
    norm_rows(s->x, layer->input_norm, s->normed, s->rows, m->hidden, m->eps, threads);
    struct linear qkv = {s->normed, layer->qkv, layer->qkv_bias, s->qkv, s->rows, m->hidden, all, m->hidden, all, 0};
    linear_run(&qkv, threads);
    struct turn turn = {m, s, index};
    run_tasks(turn_task, &turn, ceil_div(s->rows, NORM_ROWS), threads);
    struct attention attention = {
        .pool = m->pool + 2 * index * m->block_size * kv_size,
        .q = s->qkv,
        .out = s->attended,
        .tiles = s->tiles,
        .blocks = s->blocks,
        .scores = s->scores,
        .scores_step = s->scores_step,
        .whole_rows = s->num_tiles >= 2 * s->num_threads,
        .num_tiles = s->num_tiles,
        .block_step = m->num_layers * 2 * m->block_size * kv_size,
        .v_offset = m->block_size * kv_size,
        .block_size = m->block_size,
        .kv_heads = m->kv_heads,
        .group = m->heads / m->kv_heads,
        .head_dim = dim,
        .q_step = all,
        .out_step = m->heads * dim,
        .max_len = s->max_len,
        .window = layer->window,
        .scale = m->scale,
    };
    run_tasks(attend_task, &attention, s->num_tiles * m->kv_heads, threads);
}

struct feed {
    struct linear gate, up;
};

static void feed_task(const void *context, long task, int thread) {
    const struct feed *job = context;
    struct share share = share_of(&job->gate, task);
    long outputs = job->gate.outputs, size = job->gate.inputs * PANEL;
    (void)thread;
    linear_share(&job->gate, share, job->up.weight + share.p * size);
    linear_share(&job->up, share, job->gate.weight + share.end * size);
    for (long r = share.first; r < share.last; r++) {
        float *gate = job->gate.y + r * outputs, *up = job->up.y + r * outputs;
        for (long i = share.p * PANEL; i < min_long(outputs, share.end * PANEL); i += LANES) {
            vec value = load(gate + i);
            store(gate + i, value / (spread(1.0f) + exp_lanes(-value)) * load(up + i));
        }
    }
}

static void feed_part(const struct model *m, long index, const struct step *s) {
    const struct layer *layer = &m->layers[index];
    long hidden = m->hidden, ffn = m->ffn, q_size = m->heads * m->head_dim, rows = s->rows;
    int threads = (int)s->num_threads;
    struct linear o = {s->attended, layer->o, layer->o_bias, s->x, rows, q_size, hidden, q_size, hidden, 1};
    linear_run(&o, threads);
    norm_rows(s->x, layer->post_norm, s->normed, rows, hidden, m->eps, threads);
    const float *bias = layer->gate_up_bias, *up = layer->gate_up + num_panels(ffn) * PANEL * hidden;
    struct feed feed = {
        {s->normed, layer->gate_up, bias, s->gate, rows, hidden, ffn, hidden, ffn, 0},
        {s->normed, up, bias ? bias + ffn : 0, s->up, rows, hidden, ffn, hidden, ffn, 0},
    };
    run_tasks(feed_task, &feed, num_shares(&feed.gate), threads);
    struct linear down = {s->gate, layer->down, layer->down_bias, s->x, rows, ffn, hidden, ffn, hidden, 1};
    linear_run(&down, threads);
}

/* ---- what Python calls ---- */

EXPORT int64_t diptych_panel(void) { return PANEL; }
EXPORT int64_t diptych_tile(void) { return TILE; }
EXPORT int64_t diptych_lanes(void) { return LANES; }
EXPORT int64_t diptych_tile_rows(int64_t group) { return tile_rows(group); }

/* weight: [outputs][inputs]; out: outputs rounded up to PANEL, times inputs. */
EXPORT void diptych_pack(const float *weight, int64_t outputs, int64_t inputs, float *out) {
    for (long p = 0; p < num_panels(outputs); p++) pack_panel(weight, inputs, outputs, p, out + p * PANEL * inputs);
}

/* Layers [first, last) of the step. */
EXPORT void diptych_layers(const struct model *model, const struct step *step, int64_t first, int64_t last) {
    for (long index = first; index < last; index++) {
        attention_part(model, index, step);
        feed_part(model, index, step);
    }
}

/* The last layer in two halves: between them the rows whose logits nobody wants drop out. */
EXPORT void diptych_attention_part(const struct model *model, const struct step *step, int64_t index) {
    attention_part(model, index, step);
}
EXPORT void diptych_feed_part(const struct model *model, const struct step *step, int64_t index) {
    feed_part(model, index, step);
}

EXPORT void diptych_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t size, float eps) {
    norm_rows(x, weight, y, rows, size, eps, 1);
}

/* y: [rows][outputs] = x W^T + bias */
EXPORT void diptych_linear(const float *x, const float *packed, const float *bias, float *y, int64_t rows, int64_t inputs,
                           int64_t outputs, int64_t num_threads) {
    struct linear job = {x, packed, bias, y, rows, inputs, outputs, inputs, outputs, 0};
    linear_run(&job, (int)num_threads);
}
