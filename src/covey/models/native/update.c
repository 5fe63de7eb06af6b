/* All layers of a model of the Llama family and the norm behind them, forward and backward, each in one call: what
   `covey.models.llama_update` computes.

   T tokens; the widths of products are multiples of PANEL. Threads share blocks of a product, rows of anything
   else. */

#include "products.h"
#include "stack.h"

/* RMSNorm: unit = x * scale, and what a product takes, unit * weight. */
typedef struct {
    const float *weight;
    float *unit, *scale, *normed;
} Norm;

/* What a layer's forward pass leaves to its backward pass. */
typedef struct {
    float *unit, *scale, *heads, *lse, *attended, *mlp_unit, *mlp_scale, *gates, *ups, *inner;
} Kept;

/* What a pass needs for a layer at a time. */
typedef struct {
    float *normed, *grad_normed, *grad_heads, *grad_attended, *grad_gates, *grad_ups, *bias;
} Scratch;

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

/* y = g.T @ x, of (T, rows) with `next` between its tokens and (T, columns), or what is added to y; nothing where y is
   null. */
static void weight_product(Share of, const Stack *s, const float *g, long rows, long next, const float *x, float *y,
                           long columns) {
    if (y)
        panel_product(of, rows, columns,
                      (Product){.a = g, .row = 1, .next = next, .b = x, .panel = PANEL, .line = columns,
                                .inner = s->tokens, .y = y, .stride = columns, .adds = s->adds});
}

static void normalise(Share of, const Stack *s, const float *x, Norm n) {
    long first, last = share(of, s->tokens, 1, &first), width = s->width;
    for (long t = first; t < last; t++) {
        vec squares = {0};
        for (long k = 0; k < width; k += LANES) squares += load(x + t * width + k) * load(x + t * width + k);
        float scale = n.scale[t] = 1 / sqrtf(sum(squares) / width + s->epsilon);
        for (long k = 0; k < width; k += LANES) {
            vec unit = load(x + t * width + k) * scale;
            store(n.unit + t * width + k, unit);
            store(n.normed + t * width + k, unit * load(n.weight + k));
        }
    }
}

/* normed = unit * weight, again. */
static void renormalise(Share of, const Stack *s, Norm n) {
    long first, last = share(of, s->tokens, 1, &first), width = s->width;
    for (long t = first; t < last; t++)
        for (long k = 0; k < width; k += LANES)
            store(n.normed + t * width + k, load(n.unit + t * width + k) * load(n.weight + k));
}

/* grad_x from the gradient of normed, plus `more` where there is some, and the gradient of the norm's weight. */
static void unnormalise(Share of, const Stack *s, Norm n, const float *grad, const float *more, float *grad_x,
                        float *grad_weight) {
    long first, last = share(of, s->tokens, 1, &first), width = s->width;
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
    if (grad_weight) FOR_SHARE(of, width, k) {
        vec total = s->adds ? load(grad_weight + k) : (vec){0};
        for (long t = 0; t < s->tokens; t++) total += load(grad + t * width + k) * load(n.unit + t * width + k);
        store(grad_weight + k, total);
    }
}

/* The sum of some columns over all rows. */
static void sum_rows(Share of, const Stack *s, const float *x, long row, long columns, float *out) {
    FOR_SHARE(of, columns, k) {
        long left = columns - k;
        vec total = s->adds ? load_part(out + k, left) : (vec){0};
        for (long t = 0; t < s->tokens; t++) total += load_part(x + t * row + k, left);
        store_part(out + k, total, left);
    }
}

/* Numbers of a row of queries, of one of keys, and of one of all heads. */
INLINE long queries(const Stack *s) { return s->attention.heads * s->attention.head_width; }
INLINE long keys(const Stack *s) { return s->attention.key_heads * s->attention.head_width; }
INLINE long all_heads(const Stack *s) { return queries(s) + 2 * keys(s); }

INLINE float *take(float **from, long count) {
    float *part = *from;
    *from += (count + LANES - 1) / LANES * LANES;
    return part;
}

/* Of one layer; `take` leaves gaps. */
int64_t stack_kept(const Stack *s) {
    return s->tokens * (2 * s->width + 2 + all_heads(s) + s->attention.heads + queries(s)) + 7 * LANES;
}

int64_t stack_panels(const Stack *s) { return s->width * (all_heads(s) + queries(s) + 3 * s->inner); }

int64_t stack_scratch(const Stack *s, int is_backward) {
    long forward = s->tokens * s->width + all_heads(s);
    long backward = s->tokens * (2 * s->width + all_heads(s) + queries(s) + 2 * s->inner);
    return s->attention.threads * attention_scratch(&s->attention) + (is_backward ? backward : forward) + 6 * LANES;
}

/* The scratch of what is no attention. */
static float *layer_scratch(const Stack *s) {
    return s->scratch + s->attention.threads * attention_scratch(&s->attention);
}

static Kept kept_of(const Stack *s, long layer) {
    float *at = s->kept[layer], *gated = s->gated[layer];
    Kept k = {.gates = gated, .ups = gated + s->tokens * s->inner, .inner = gated + 2 * s->tokens * s->inner};
    k.unit = take(&at, s->tokens * s->width), k.scale = take(&at, s->tokens);
    k.heads = take(&at, s->tokens * all_heads(s)), k.lse = take(&at, s->tokens * s->attention.heads);
    k.attended = take(&at, s->tokens * queries(s));
    k.mlp_unit = take(&at, s->tokens * s->width), k.mlp_scale = take(&at, s->tokens);
    return k;
}

static Scratch forward_scratch(const Stack *s) {
    float *at = layer_scratch(s);
    Scratch h = {.normed = take(&at, s->tokens * s->width)};
    h.bias = take(&at, all_heads(s));
    return h;
}

static Scratch backward_scratch(const Stack *s) {
    float *at = layer_scratch(s);
    Scratch h = {.normed = take(&at, s->tokens * s->width), .grad_normed = take(&at, s->tokens * s->width)};
    h.grad_heads = take(&at, s->tokens * all_heads(s)), h.grad_attended = take(&at, s->tokens * queries(s));
    h.grad_gates = take(&at, s->tokens * s->inner), h.grad_ups = take(&at, s->tokens * s->inner);
    return h;
}

/* Queries and keys of a token by its place, or back. */
static void turn(const Stack *s, float *row, long token, int is_back) {
    long width = s->attention.head_width, half = width / 2, turned = queries(s) + keys(s);
    long at = s->position[token] * width;
    const float *cosine = s->cosines + at, *sine = s->sines + at;
    for (long h = 0; h < turned; h += width)
        for (long k = 0; k < half; k++) {
            float low = row[h + k], high = row[h + half + k];
            row[h + k] = low * cosine[k] + high * (is_back ? sine[k + half] : sine[k]);
            row[h + half + k] = high * cosine[k + half] + low * (is_back ? sine[k] : sine[k + half]);
        }
}

/* Queries, keys and values of a layer's input. */
static void before_attention(const Stack *s, Weights w, float *panels, Kept k, Scratch h) {
    const float *weights[3] = {w.query, w.key, w.value}, *biases[3] = {w.query_bias, w.key_bias, w.value_bias};
    long sizes[3] = {queries(s), keys(s), keys(s)}, width = s->width, heads = all_heads(s);
    for (long part = 0, from = 0; biases[0] && part < 3; from += sizes[part++])
        memcpy(h.bias + from, biases[part], sizes[part] * sizeof(float));
#pragma omp parallel num_threads(s->attention.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        normalise(of, s, s->x, (Norm){w.norm, k.unit, k.scale, h.normed});
        for (long part = 0, from = 0; part < 3 && !s->is_laid; from += sizes[part++])
            lay(of, weights[part], sizes[part], width, panels + from * width);
#pragma omp barrier
        Product product = forward_product(h.normed, width, panels, k.heads, heads);
        product.bias = biases[0] ? h.bias : 0;
        panel_product(of, s->tokens, heads, product);
#pragma omp barrier
        long first, last = share(of, s->tokens, 1, &first);
        for (long t = first; t < last; t++) turn(s, k.heads + t * heads, t, 0);
    }
}

static void before_attention_backward(const Stack *s, Weights w, Kept k, Scratch h, Weights grads) {
    const float *weights[3] = {w.query, w.key, w.value};
    float *to[3] = {grads.query, grads.key, grads.value};
    float *biases[3] = {grads.query_bias, grads.key_bias, grads.value_bias};
    long sizes[3] = {queries(s), keys(s), keys(s)}, width = s->width, heads = all_heads(s), tokens = s->tokens;
    Norm norm = {w.norm, k.unit, k.scale, h.normed};
#pragma omp parallel num_threads(s->attention.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long first, last = share(of, tokens, 1, &first);
        for (long t = first; t < last; t++) turn(s, h.grad_heads + t * heads, t, 1);
        renormalise(of, s, norm);
#pragma omp barrier
        for (long part = 0, from = 0; part < 3; from += sizes[part++]) {
            const float *grad = h.grad_heads + from;
            weight_product(of, s, grad, sizes[part], heads, h.normed, to[part], width);
            if (biases[part]) sum_rows(of, s, grad, heads, sizes[part], biases[part]);
            Product by_input = backward_product(grad, sizes[part], weights[part], h.grad_normed, width);
            by_input.row = heads;
            by_input.adds = part > 0;
            panel_product(of, tokens, width, by_input);
        }
#pragma omp barrier
        unnormalise(of, s, norm, h.grad_normed, s->grad_x, s->grad_x, grads.norm);
    }
}

/* A layer's output from what its heads attended to, in place of its input. */
static void behind_attention(const Stack *s, Weights w, float *panels, Kept k, Scratch h) {
#pragma omp parallel num_threads(s->attention.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = s->width, tokens = s->tokens, seen = queries(s), inner = s->inner;
        float *out = panels + width * all_heads(s), *gate = out + width * seen;
        float *up = gate + inner * width, *down = up + inner * width;
        if (!s->is_laid) {
            lay(of, w.out, width, seen, out);
            lay(of, w.gate, inner, width, gate);
            lay(of, w.up, inner, width, up);
            lay(of, w.down, width, inner, down);
#pragma omp barrier
        }
        Product residual = forward_product(k.attended, seen, out, s->x, width);
        residual.adds = 1;
        panel_product(of, tokens, width, residual);
#pragma omp barrier
        normalise(of, s, s->x, (Norm){w.mlp_norm, k.mlp_unit, k.mlp_scale, h.normed});
#pragma omp barrier
        panel_product(of, tokens, inner, forward_product(h.normed, width, gate, k.gates, inner));
        panel_product(of, tokens, inner, forward_product(h.normed, width, up, k.ups, inner));
#pragma omp barrier
        FOR_SHARE(of, tokens * inner, i) {
            vec x = load(k.gates + i);
            store(k.inner + i, x / (1.0f + exponential(-x)) * load(k.ups + i));
        }
#pragma omp barrier
        residual = forward_product(k.inner, inner, down, s->x, width);
        residual.adds = 1;
        panel_product(of, tokens, width, residual);
    }
}

static void behind_attention_backward(const Stack *s, Weights w, Kept k, Scratch h, Weights grads) {
    Norm norm = {w.mlp_norm, k.mlp_unit, k.mlp_scale, h.normed};
#pragma omp parallel num_threads(s->attention.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = s->width, tokens = s->tokens, seen = queries(s), inner = s->inner;
        panel_product(of, tokens, inner, backward_product(s->grad_x, width, w.down, h.grad_gates, inner));
        weight_product(of, s, s->grad_x, width, width, k.inner, grads.down, inner);
        renormalise(of, s, norm);
#pragma omp barrier
        FOR_SHARE(of, tokens * inner, i) {
            vec x = load(k.gates + i), open = 1.0f / (1.0f + exponential(-x)), g = load(h.grad_gates + i);
            store(h.grad_ups + i, g * x * open);
            store(h.grad_gates + i, g * load(k.ups + i) * open * (1.0f + x * (1.0f - open)));
        }
#pragma omp barrier
        weight_product(of, s, h.grad_gates, inner, inner, h.normed, grads.gate, width);
        weight_product(of, s, h.grad_ups, inner, inner, h.normed, grads.up, width);
        panel_product(of, tokens, width, backward_product(h.grad_gates, inner, w.gate, h.grad_normed, width));
        Product more = backward_product(h.grad_ups, inner, w.up, h.grad_normed, width);
        more.adds = 1;
        panel_product(of, tokens, width, more);
#pragma omp barrier
        unnormalise(of, s, norm, h.grad_normed, s->grad_x, s->grad_x, grads.mlp_norm);
#pragma omp barrier
        panel_product(of, tokens, seen, backward_product(s->grad_x, width, w.out, h.grad_attended, seen));
        weight_product(of, s, s->grad_x, width, width, k.attended, grads.out, seen);
    }
}

/* The norm behind the last layer, in place. */
static Norm last_norm(const Stack *s) {
    float *at = s->kept[s->layers], *unit = take(&at, s->tokens * s->width);
    return (Norm){s->norm, unit, at, s->x};
}

/* The attention of a layer behind the tokens before these. */
static Attention attention_of(const Stack *s, long layer, Kept k) {
    Attention attention = s->attention;
    long before = layer * s->past * 2 * keys(s);
    attention.x = k.heads, attention.lse = k.lse, attention.held = s->scratch, attention.past = s->past;
    if (s->past) attention.past_keys = s->past_keys + before;
    if (s->grad_past_keys) attention.grad_past_keys = s->grad_past_keys + before;
    return attention;
}

/* Keys and values of a layer for what goes on from these tokens, and the gradients that it gave back. */
static void keep_keys(const Stack *s, long layer, Kept k) {
    long width = 2 * keys(s);
    for (long t = 0; t < s->tokens && s->keys; t++)
        memcpy(s->keys + (layer * s->tokens + t) * width, k.heads + t * all_heads(s) + queries(s),
               width * sizeof(float));
}

static void add_key_gradients(const Stack *s, long layer, float *grad_heads) {
    long width = 2 * keys(s);
    for (long t = 0; t < s->tokens && s->grad_keys; t++) {
        const float *from = s->grad_keys + (layer * s->tokens + t) * width;
        float *to = grad_heads + t * all_heads(s) + queries(s);
        for (long i = 0; i < width; i++) to[i] += from[i];
    }
}

void stack_forward(const Stack *s) {
    Scratch h = forward_scratch(s);
    for (long layer = 0; layer < s->layers; layer++) {
        Kept k = kept_of(s, layer);
        float *panels = s->panels + (s->has_all_panels ? layer * stack_panels(s) : 0);
        before_attention(s, s->weights[layer], panels, k, h);
        keep_keys(s, layer, k);
        Attention attention = attention_of(s, layer, k);
        attention.out = k.attended;
        attend(&attention);
        behind_attention(s, s->weights[layer], panels, k, h);
    }
#pragma omp parallel num_threads(s->attention.threads)
    normalise((Share){omp_get_thread_num(), omp_get_num_threads()}, s, s->x, last_norm(s));
}

void stack_backward(const Stack *s) {
    Scratch h = backward_scratch(s);
#pragma omp parallel num_threads(s->attention.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        unnormalise(of, s, last_norm(s), s->grad, 0, s->grad_x, s->grad_norm);
    }
    for (long layer = s->layers; layer-- > 0;) {
        Kept k = kept_of(s, layer);
        behind_attention_backward(s, s->weights[layer], k, h, s->grads[layer]);
        Attention attention = attention_of(s, layer, k);
        attention.grad = h.grad_attended, attention.grad_x = h.grad_heads;
        attend_backward(&attention);
        add_key_gradients(s, layer, h.grad_heads);
        before_attention_backward(s, s->weights[layer], k, h, s->grads[layer]);
    }
    if (!s->grad_embedding) return;
#pragma omp parallel num_threads(s->attention.threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        /* A token may come several times: each thread adds up columns of its own. */
        long width = s->width, first, last = share(of, width, LANES, &first);
        for (long t = 0; t < s->tokens; t++)
            for (long k = first; k < last; k += LANES) {
                float *to = s->grad_embedding + s->token[t] * width + k;
                store(to, load(to) + load(s->grad_x + t * width + k));
            }
    }
}
