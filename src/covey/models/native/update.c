/* What of a layer of the Llama family is not attention, forward and backward: the functions of
   `covey.models.llama_update`, each in one call.

   T tokens; the widths of products are multiples of PANEL. Threads share blocks of a product, rows of anything
   else. */

#include "products.h"

typedef struct {
    int64_t tokens, width, threads;
    float epsilon;
} Sizes;

/* RMSNorm: unit = x * scale, and what a product takes, unit * weight. */
typedef struct {
    const float *weight;
    float *unit, *scale, *normed;
} Norm;

/* Numbers that a thread takes of a flat array. */
#define FOR_SHARE(of, total, k) \
    for (long k##_first, k##_last = share(of, total, LANES, &k##_first), k = k##_first; k < k##_last; k += LANES)

INLINE vec load_part(const float *from, long left) {
    if (left >= LANES) return load(from);
    float held[LANES] = {0};
    memcpy(held, from, left * sizeof(float));
    return load(held);
}

INLINE void store_part(float *to, vec x, long left) {
    if (left >= LANES) return store(to, x);
    float held[LANES];
    store(held, x);
    memcpy(to, held, left * sizeof(float));
}

/* y = x @ w.T with w in panels. */
INLINE Product forward_product(const float *x, long inner, const float *panels, float *y, long columns) {
    return (Product){.a = x, .row = inner, .next = 1, .b = panels, .panel = inner * PANEL, .line = PANEL, .inner = inner,
                     .y = y, .stride = columns};
}

/* y = g @ w, of the gradient (T, inner) and a weight (inner, columns). */
INLINE Product backward_product(const float *g, long inner, const float *weight, float *y, long columns) {
    return (Product){.a = g, .row = inner, .next = 1, .b = weight, .panel = PANEL, .line = columns, .inner = inner,
                     .y = y, .stride = columns};
}

/* y = g.T @ x, of (T, rows) and (T, columns). */
INLINE Product weight_product(const float *g, long rows, const float *x, long tokens, float *y, long columns) {
    return (Product){.a = g, .row = 1, .next = rows, .b = x, .panel = PANEL, .line = columns, .inner = tokens,
                     .y = y, .stride = columns};
}

static void normalise(Share of, Sizes s, const float *x, Norm n) {
    long first, last = share(of, s.tokens, 1, &first), width = s.width;
    for (long t = first; t < last; t++) {
        vec squares = {0};
        for (long k = 0; k < width; k += LANES) squares += load(x + t * width + k) * load(x + t * width + k);
        float scale = n.scale[t] = 1 / sqrtf(sum(squares) / width + s.epsilon);
        for (long k = 0; k < width; k += LANES) {
            vec unit = load(x + t * width + k) * scale;
            store(n.unit + t * width + k, unit);
            store(n.normed + t * width + k, unit * load(n.weight + k));
        }
    }
}

/* normed = unit * weight, again. */
static void renormalise(Share of, Sizes s, Norm n) {
    long first, last = share(of, s.tokens, 1, &first), width = s.width;
    for (long t = first; t < last; t++)
        for (long k = 0; k < width; k += LANES)
            store(n.normed + t * width + k, load(n.unit + t * width + k) * load(n.weight + k));
}

/* grad_x from the gradient of normed, plus `more` where there is some, and the gradient of the norm's weight. */
static void unnormalise(Share of, Sizes s, Norm n, const float *grad, const float *more, float *grad_x,
                        float *grad_weight) {
    long first, last = share(of, s.tokens, 1, &first), width = s.width;
    for (long t = first; t < last; t++) {
        const float *g = grad + t * width, *unit = n.unit + t * width;
        vec along = {0};
        for (long k = 0; k < width; k += LANES) along += load(g + k) * load(unit + k) * load(n.weight + k);
        float mean = sum(along) / width, scale = n.scale[t];
        for (long k = 0; k < width; k += LANES) {
            vec x = (load(g + k) * load(n.weight + k) - load(unit + k) * mean) * scale;
            if (more) x += load(more + t * width + k);
            store(grad_x + t * width + k, x);
        }
    }
    FOR_SHARE(of, width, k) {
        vec total = {0};
        for (long t = 0; t < s.tokens; t++) total += load(grad + t * width + k) * load(n.unit + t * width + k);
        store(grad_weight + k, total);
    }
}

/* The sum over rows of (T, columns). */
static void sum_rows(Share of, const float *x, long tokens, long columns, float *out) {
    FOR_SHARE(of, columns, k) {
        long left = columns - k;
        vec total = {0};
        for (long t = 0; t < tokens; t++) total += load_part(x + t * columns + k, left);
        store_part(out + k, total, left);
    }
}

typedef struct {
    Sizes sizes;
    Norm norm;
    int64_t heads, turned, head_width; /* numbers of a row of heads, of those that are turned, and of a head */
    const float *cosines, *sines, *x, *query, *key, *value, *bias;
    int64_t queries, keys;
    float *panels, *out;
    const float *grad;
    float *turned_back, *grad_normed, *grad_x, *grad_weight, *grad_bias, *grad_norm;
} Before;

static void turn(const Before *b, float *row, long token, int is_back) {
    long width = b->head_width, half = width / 2;
    const float *cosine = b->cosines + token * width, *sine = b->sines + token * width;
    for (long h = 0; h < b->turned; h += width)
        for (long k = 0; k < half; k++) {
            float low = row[h + k], high = row[h + half + k];
            row[h + k] = low * cosine[k] + high * (is_back ? sine[k + half] : sine[k]);
            row[h + half + k] = high * cosine[k + half] + low * (is_back ? sine[k] : sine[k + half]);
        }
}

void before_attention(const Before *b) {
#pragma omp parallel num_threads(b->sizes.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = b->sizes.width, tokens = b->sizes.tokens;
        normalise(of, b->sizes, b->x, b->norm);
        lay(of, b->query, b->queries, width, b->panels);
        lay(of, b->key, b->keys, width, b->panels + b->queries * width);
        lay(of, b->value, b->keys, width, b->panels + (b->queries + b->keys) * width);
#pragma omp barrier
        Product heads = forward_product(b->norm.normed, width, b->panels, b->out, b->heads);
        heads.bias = b->bias;
        panel_product(of, tokens, b->heads, heads);
#pragma omp barrier
        long first, last = share(of, tokens, 1, &first);
        for (long t = first; t < last; t++) turn(b, b->out + t * b->heads, t, 0);
    }
}

void before_attention_backward(const Before *b) {
#pragma omp parallel num_threads(b->sizes.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = b->sizes.width, tokens = b->sizes.tokens, first, last = share(of, tokens, 1, &first);
        for (long t = first; t < last; t++) {
            memcpy(b->turned_back + t * b->heads, b->grad + t * b->heads, b->heads * sizeof(float));
            turn(b, b->turned_back + t * b->heads, t, 1);
        }
        renormalise(of, b->sizes, b->norm);
#pragma omp barrier
        panel_product(of, b->heads, width,
                      weight_product(b->turned_back, b->heads, b->norm.normed, tokens, b->grad_weight, width));
        if (b->grad_bias) sum_rows(of, b->turned_back, tokens, b->heads, b->grad_bias);
        const float *weights[3] = {b->query, b->key, b->value};
        long sizes[3] = {b->queries, b->keys, b->keys}, from = 0;
        for (int part = 0; part < 3; from += sizes[part++]) {
            Product back = backward_product(b->turned_back + from, sizes[part], weights[part], b->grad_normed, width);
            back.row = b->heads;
            back.adds = part > 0;
            panel_product(of, tokens, width, back);
        }
#pragma omp barrier
        unnormalise(of, b->sizes, b->norm, b->grad_normed, 0, b->grad_x, b->grad_norm);
    }
}

typedef struct {
    Sizes sizes;
    Norm norm;
    int64_t attended_width, inner_width;
    const float *x, *attended, *out, *gate, *up, *down;
    float *panels, *gates, *ups, *inner, *y;
    const float *grad;
    float *grad_inner, *grad_gates, *grad_ups, *grad_normed, *grad_x, *grad_attended;
    float *grad_out, *grad_gate, *grad_up, *grad_down, *grad_norm;
} Behind;

void behind_attention(const Behind *b) {
#pragma omp parallel num_threads(b->sizes.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = b->sizes.width, tokens = b->sizes.tokens, seen = b->attended_width, inner = b->inner_width;
        float *out = b->panels, *gate = out + width * seen, *up = gate + inner * width, *down = up + inner * width;
        long first, last = share(of, tokens, 1, &first);
        memcpy(b->y + first * width, b->x + first * width, (last - first) * width * sizeof(float));
        lay(of, b->out, width, seen, out);
        lay(of, b->gate, inner, width, gate);
        lay(of, b->up, inner, width, up);
        lay(of, b->down, width, inner, down);
#pragma omp barrier
        Product residual = forward_product(b->attended, seen, out, b->y, width);
        residual.adds = 1;
        panel_product(of, tokens, width, residual);
#pragma omp barrier
        normalise(of, b->sizes, b->y, b->norm);
#pragma omp barrier
        panel_product(of, tokens, inner, forward_product(b->norm.normed, width, gate, b->gates, inner));
        panel_product(of, tokens, inner, forward_product(b->norm.normed, width, up, b->ups, inner));
#pragma omp barrier
        FOR_SHARE(of, tokens * inner, k) {
            vec x = load(b->gates + k);
            store(b->inner + k, x / (1.0f + exponential(-x)) * load(b->ups + k));
        }
#pragma omp barrier
        residual = forward_product(b->inner, inner, down, b->y, width);
        residual.adds = 1;
        panel_product(of, tokens, width, residual);
    }
}

void behind_attention_backward(const Behind *b) {
#pragma omp parallel num_threads(b->sizes.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = b->sizes.width, tokens = b->sizes.tokens, seen = b->attended_width, inner = b->inner_width;
        panel_product(of, tokens, inner, backward_product(b->grad, width, b->down, b->grad_inner, inner));
        panel_product(of, width, inner, weight_product(b->grad, width, b->inner, tokens, b->grad_down, inner));
        renormalise(of, b->sizes, b->norm);
#pragma omp barrier
        FOR_SHARE(of, tokens * inner, k) {
            vec x = load(b->gates + k), s = 1.0f / (1.0f + exponential(-x)), g = load(b->grad_inner + k);
            store(b->grad_ups + k, g * x * s);
            store(b->grad_gates + k, g * load(b->ups + k) * s * (1.0f + x * (1.0f - s)));
        }
#pragma omp barrier
        panel_product(of, inner, width, weight_product(b->grad_gates, inner, b->norm.normed, tokens, b->grad_gate, width));
        panel_product(of, inner, width, weight_product(b->grad_ups, inner, b->norm.normed, tokens, b->grad_up, width));
        panel_product(of, tokens, width, backward_product(b->grad_gates, inner, b->gate, b->grad_normed, width));
        Product more = backward_product(b->grad_ups, inner, b->up, b->grad_normed, width);
        more.adds = 1;
        panel_product(of, tokens, width, more);
#pragma omp barrier
        unnormalise(of, b->sizes, b->norm, b->grad_normed, b->grad, b->grad_x, b->grad_norm);
#pragma omp barrier
        panel_product(of, tokens, seen, backward_product(b->grad_x, width, b->out, b->grad_attended, seen));
        panel_product(of, width, seen, weight_product(b->grad_x, width, b->attended, tokens, b->grad_out, seen));
    }
}
