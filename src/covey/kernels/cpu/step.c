/* One forward pass of a model of the Llama family over new tokens, whose keys and values go to a cache.

   A token sees `count` keys of a prompt's slot and then those of its own row, each from its first column on;
   it is itself the last of them. Threads share columns of a product, rows of anything else. */

#include "products.h"

/* A linear layer; `panels` hold a copy of the weight where that is worth one. */
typedef struct {
    const number *weight;
    const float *bias, *panels;
} Linear;

typedef struct {
    Linear query, key, value, out, gate, up, down;
    const float *before_attention, *before_mlp, *query_norm, *key_norm;
    number *prefix, *own; /* keys and then values: (2, slots, key heads, columns, head width) */
} Layer;

typedef struct {
    int64_t layers, width, heads, key_heads, head_width, inner;
    float epsilon, scaling;
    const number *embedding;
    const float *norm, *cosines, *sines;
    const Layer *layer;
    int64_t prefix_slots, prefix_columns, own_slots, own_columns;
} Model;

typedef struct {
    int64_t number;
    int64_t *token, *position, *row_count;
    const int64_t *slot, *slot_first, *slot_count, *row, *row_first;
    float *hidden, *heads, *attended, *gate, *up, *normed, *scores;
    int64_t scores_width, threads;
} Tokens;

INLINE float dot(const float *a, const float *b, long width) {
    vec total = {0};
    long k = 0;
    for (; k + LANES <= width; k += LANES) total += load(a + k) * load(b + k);
    float rest = sum(total);
    for (; k < width; k++) rest += a[k] * b[k];
    return rest;
}

INLINE float dot_numbers(const float *a, const number *b, long width) {
    vec total = {0};
    long k = 0;
    for (; k + LANES <= width; k += LANES) total += load(a + k) * load_numbers(b + k);
    float rest = sum(total);
    for (; k < width; k++) rest += a[k] * value_of(b[k]);
    return rest;
}

INLINE void normalise(const float *x, const float *weight, float epsilon, long width, float *out) {
    float scale = 1 / sqrtf(dot(x, x, width) / width + epsilon);
    for (long k = 0; k < width; k++) out[k] = rounded(rounded(x[k] * scale) * weight[k]);
}

/* Norm of all tokens, by each thread for itself: it is small beside the product that follows. */
static const float *normed(const Model *m, const Tokens *t, const float *weight, long thread) {
    float *out = t->normed + thread * t->number * m->width;
    for (long i = 0; i < t->number; i++)
        normalise(t->hidden + i * m->width, weight, m->epsilon, m->width, out + i * m->width);
    return out;
}

/* y = x @ weight.T + bias of n rows, or what is added to y: this thread's share of it. */
static void multiply(Share of, long n, const float *x, long width, Linear by, float *y, long columns, long stride,
                     int adds) {
    long first, last;
    if (!by.panels) {
        last = share(of, columns, COLUMNS, &first);
        product(n, x, width, by.weight, by.bias, y, stride, first, last, adds);
        return;
    }
    panel_product(of, n, columns,
                  (Product){.a = x, .row = width, .next = 1, .b = by.panels, .panel = width * PANEL, .line = PANEL,
                            .inner = width, .bias = by.bias, .y = y, .stride = stride, .adds = adds});
}

/* A head of queries or keys, normed where the model norms it, and turned by its position. */
static void turn(const Model *m, const Tokens *t, long token, float *head, const float *norm) {
    long width = m->head_width, half = width / 2;
    const float *cosine = m->cosines + t->position[token] * width, *sine = m->sines + t->position[token] * width;
    if (norm) normalise(head, norm, m->epsilon, width, head);
    for (long k = 0; k < half; k++) {
        float low = head[k], high = head[k + half];
        head[k] = rounded(rounded(low * cosine[k]) + rounded(high * sine[k]));
        head[k + half] = rounded(rounded(high * cosine[k + half]) + rounded(low * sine[k + half]));
    }
}

/* Where a slot's key head begins. */
INLINE number *place(const Model *m, number *cache, long slots, long columns, long slot, long head, int is_value) {
    return cache + (((is_value * slots + slot) * m->key_heads + head) * columns) * m->head_width;
}

/* Turns the heads of some tokens, and puts keys and values where the tokens end. */
static void remember(Share of, const Model *m, const Tokens *t, const Layer *layer) {
    long first, last = share(of, t->number, 1, &first), every = m->heads + 2 * m->key_heads;
    for (long i = first; i < last; i++) {
        float *heads = t->heads + i * every * m->head_width;
        for (long h = 0; h < m->heads; h++) turn(m, t, i, heads + h * m->head_width, layer->query_norm);
        for (long h = 0; h < m->key_heads; h++) {
            float *key = heads + (m->heads + h) * m->head_width, *value = key + m->key_heads * m->head_width;
            turn(m, t, i, key, layer->key_norm);
            int has_own = t->row_count[i] > 0;
            number *cache = has_own ? layer->own : layer->prefix;
            long slots = has_own ? m->own_slots : m->prefix_slots;
            long columns = has_own ? m->own_columns : m->prefix_columns;
            long slot = has_own ? t->row[i] : t->slot[i];
            long end = has_own ? t->row_first[i] + t->row_count[i] : t->slot_first[i] + t->slot_count[i];
            long offset = (end - 1) * m->head_width;
            number *keys = place(m, cache, slots, columns, slot, h, 0) + offset;
            number *values = place(m, cache, slots, columns, slot, h, 1) + offset;
            for (long k = 0; k < m->head_width; k++) keys[k] = nearest(key[k]), values[k] = nearest(value[k]);
        }
    }
}

/* Softmax of `count` scores in place. */
static void softmax(float *score, long count) {
    float peak = score[0], total;
    for (long l = 1; l < count; l++) peak = score[l] > peak ? score[l] : peak;
    for (long l = count; l % LANES; l++) score[l] = -INFINITY;
    vec mass = {0};
    for (long l = 0; l < count; l += LANES) {
        vec weight = exponential(load(score + l) - peak);
        store(score + l, weight);
        mass += weight;
    }
    total = 1 / sum(mass);
    for (long l = 0; l < count; l++) score[l] *= total;
}

/* What one query head of a token sees; `width` is known when this is compiled, or general. */
INLINE void see(const float *query, const number *keys[2], const number *values[2], const long counts[2],
                long width, float scaling, float *score, float *out) {
    long place = 0;
    for (int part = 0; part < 2; part++)
        for (long l = 0; l < counts[part]; l++) score[place++] = scaling * dot_numbers(query, keys[part] + l * width, width);
    softmax(score, place);
    memset(out, 0, width * sizeof(float));
    place = 0;
    for (int part = 0; part < 2; part++)
        for (long l = 0; l < counts[part]; l++, place++)
            for (long k = 0; k < width; k++) out[k] += score[place] * value_of(values[part][l * width + k]);
    for (long k = 0; k < width; k++) out[k] = rounded(out[k]);
}

static void attend(Share of, const Model *m, const Tokens *t, const Layer *layer) {
    long first, last = share(of, t->number * m->key_heads, 1, &first);
    long every = m->heads + 2 * m->key_heads, repeats = m->heads / m->key_heads, width = m->head_width;
    float *score = t->scores + of.thread * t->scores_width;
    for (long task = first; task < last; task++) {
        long i = task / m->key_heads, h = task % m->key_heads;
        const number *keys[2], *values[2];
        long counts[2] = {t->slot_count[i], t->row_count[i]};
        for (int is_value = 0; is_value < 2; is_value++) {
            const number **at = is_value ? values : keys;
            at[0] = place(m, layer->prefix, m->prefix_slots, m->prefix_columns, t->slot[i], h, is_value);
            at[1] = place(m, layer->own, m->own_slots, m->own_columns, t->row[i], h, is_value);
            at[0] += t->slot_first[i] * width;
            at[1] += t->row_first[i] * width;
        }
        for (long g = h * repeats; g < (h + 1) * repeats; g++) {
            const float *query = t->heads + (i * every + g) * width;
            float *out = t->attended + (i * m->heads + g) * width;
            switch (width) {
            case 32: see(query, keys, values, counts, 32, m->scaling, score, out); break;
            case 64: see(query, keys, values, counts, 64, m->scaling, score, out); break;
            case 128: see(query, keys, values, counts, 128, m->scaling, score, out); break;
            default: see(query, keys, values, counts, width, m->scaling, score, out);
            }
        }
    }
}

INLINE vec silu(vec x) { return all_rounded(x / (1.0f + exponential(-x))); }

/* gate = silu(gate) * up */
static void combine(Share of, const Model *m, const Tokens *t) {
    long first, last = share(of, t->number * m->inner, LANES, &first), k = first;
    for (; k + LANES <= last; k += LANES)
        store(t->gate + k, all_rounded(silu(load(t->gate + k)) * load(t->up + k)));
    for (; k < last; k++) t->gate[k] = rounded(silu(each(t->gate[k]))[0] * t->up[k]);
}

static void layer_pass(Share of, const Model *m, const Tokens *t, const Layer *layer) {
    long queries = m->heads * m->head_width, keys = m->key_heads * m->head_width, every = queries + 2 * keys;
    const float *x = normed(m, t, layer->before_attention, of.thread);
    multiply(of, t->number, x, m->width, layer->query, t->heads, queries, every, 0);
    multiply(of, t->number, x, m->width, layer->key, t->heads + queries, keys, every, 0);
    multiply(of, t->number, x, m->width, layer->value, t->heads + queries + keys, keys, every, 0);
#pragma omp barrier
    remember(of, m, t, layer);
#pragma omp barrier
    attend(of, m, t, layer);
#pragma omp barrier
    multiply(of, t->number, t->attended, queries, layer->out, t->hidden, m->width, m->width, 1);
#pragma omp barrier
    x = normed(m, t, layer->before_mlp, of.thread);
    multiply(of, t->number, x, m->width, layer->gate, t->gate, m->inner, m->inner, 0);
    multiply(of, t->number, x, m->width, layer->up, t->up, m->inner, m->inner, 0);
#pragma omp barrier
    combine(of, m, t);
#pragma omp barrier
    multiply(of, t->number, t->gate, m->inner, layer->down, t->hidden, m->width, m->width, 1);
#pragma omp barrier
}

void NAME(step)(const Model *m, const Tokens *t) {
#pragma omp parallel num_threads(t->threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long first, last = share(of, t->number, 1, &first);
        for (long i = first; i < last; i++)
            for (long k = 0; k < m->width; k++)
                t->hidden[i * m->width + k] = value_of(m->embedding[t->token[i] * m->width + k]);
#pragma omp barrier
        for (long l = 0; l < m->layers; l++) layer_pass(of, m, t, m->layer + l);
        for (long i = first; i < last; i++) {
            float *x = t->hidden + i * m->width;
            normalise(x, m->norm, m->epsilon, m->width, x);
        }
    }
}

/* A bijection of 32-bit numbers: `covey.rollout.noise`. */
INLINE uints mixed(uints x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

INLINE uint32_t mixed_one(uint32_t x) { return mixed((uints){0} + x)[0]; }

/* Tokens of a block of the vocabulary, and what sets the noise of blocks apart: `covey.rollout.noise`. */
enum { BLOCK = 512, BLOCK_KEY = 0x5bf03635 };

INLINE long padded(long count) { return (count + LANES - 1) / LANES * LANES; }

/* Standard Gumbel noise of a row's state and the first `count` tokens of a table. */
INLINE vec gumbel(uint32_t state, const int64_t *table, long count) {
    uints of_token = {0};
    for (int i = 0; i < LANES && i < count; i++) of_token[i] = (uint32_t)table[i];
    uints bits = mixed(of_token ^ state);
    vec minus_u = (__builtin_convertvector(bits, vec) + 0.5f) * -0x1p-32f;
    minus_u = larger(minus_u, each(0x1p-24f - 1.0f));
    return -logarithm(-logarithm_of_next(minus_u));
}

/* Which of `count` scores with their noise is the largest; 0 where none is a number. */
static long highest(const float *score, long count, uint32_t state, const int64_t *table) {
    long at = 0;
    float best = -INFINITY;
    for (long v = 0; v < count; v += LANES) {
        vec with_noise = load(score + v) + gumbel(state, table + v, count - v);
        for (int i = 0; i < LANES; i++)
            if (with_noise[i] > best) best = with_noise[i], at = v + i;
    }
    return at;
}

/* Divides scores by a temperature; returns log of the sum of exp. Up to a whole vector they become -infinity. */
static float log_mass(float *score, long count, float temperature) {
    vec peak = each(-INFINITY), mass = {0};
    for (long v = count; v < padded(count); v++) score[v] = -INFINITY;
    for (long v = 0; v < count; v += LANES) {
        vec scaled = load(score + v) / temperature;
        store(score + v, scaled);
        peak = larger(peak, scaled);
    }
    float top = peak[0];
    for (int i = 1; i < LANES; i++) top = peak[i] > top ? peak[i] : top;
    for (long v = 0; v < count; v += LANES) mass += exponential(load(score + v) - top);
    return top + logf(sum(mass));
}

/* Draws a token from logits / temperature: a block of the vocabulary by the masses and the noise of blocks, and of
   that the token whose logit and noise have the largest sum. */
static void draw_row(float *logit, long vocab, float temperature, uint32_t key, uint32_t position,
                     const int64_t *table, int64_t *token, float *logprob) {
    long blocks = (vocab + BLOCK - 1) / BLOCK;
    float mass[padded(blocks)];
    for (long b = 0; b < blocks; b++)
        mass[b] = log_mass(logit + b * BLOCK, vocab - b * BLOCK < BLOCK ? vocab - b * BLOCK : BLOCK, temperature);
    float total = log_mass(mass, blocks, 1);
    if (total != total) return;
    uint32_t place = mixed_one(position);
    long first = blocks > 1 ? BLOCK * highest(mass, blocks, mixed_one(key ^ BLOCK_KEY ^ place), table) : 0;
    long count = vocab - first < BLOCK ? vocab - first : BLOCK;
    *token = first + highest(logit + first, count, mixed_one(key ^ place), table + first);
    *logprob = logit[*token] - total;
}

/* Rows that draw a token each from softmax(hidden @ head.T / temperature), with the noise of its key and position.
   `shared` says whose hidden state each draws from, and `lead` which row draws first from each; null where every row
   has its own. `logits` have room for whole vectors of each state and, where they are shared, of each thread. */
typedef struct {
    int64_t number, states, width, vocab, stops, threads;
    const Linear *head;
    const float *hidden, *temperature;
    const int64_t *key, *table, *shared, *lead, *stop;
    int64_t *position, *token;
    float *logits, *logprob;
} Draws;

/* A token is 0 and its logprob NaN where the logits are no numbers. */
void NAME(draw)(const Draws *d) {
#pragma omp parallel num_threads(d->threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long stride = padded(d->vocab);
        multiply(of, d->states, d->hidden, d->width, *d->head, d->logits, d->vocab, stride, 0);
#pragma omp barrier
        long first, last = share(of, d->number, 1, &first);
        for (long i = first; i < last; i++) {
            float *logit = d->logits + i * stride;
            if (d->shared) {
                logit = d->logits + (d->states + of.thread) * stride;
                memcpy(logit, d->logits + d->shared[i] * stride, d->vocab * sizeof(float));
            }
            d->token[i] = 0, d->logprob[i] = NAN;
            draw_row(logit, d->vocab, d->temperature[i], d->key[i], d->position[i], d->table, d->token + i,
                     d->logprob + i);
        }
    }
}

/* Whether a row has drawn a token that ends it, or another one than those it shares a state with. */
static int has_happened(const Draws *d) {
    for (long i = 0; i < d->number; i++) {
        if (d->shared && d->token[i] != d->token[d->lead[d->shared[i]]]) return 1;
        for (long s = 0; s < d->stops; s++)
            if (d->token[i] == d->stop[s]) return 1;
    }
    return 0;
}

/* Feeds tokens and draws the next ones, `most` times or until something happens; returns how often. What is drawn is
   (most, number), and the counts go on with it. */
int64_t NAME(decode)(const Model *m, const Tokens *t, const Draws *given, int64_t most) {
    Draws d = *given;
    for (long done = 1;; done++) {
        NAME(step)(m, t);
        NAME(draw)(&d);
        for (long i = 0; i < d.number; i++) d.position[i]++;
        if (done == most || has_happened(&d)) return done;
        for (long i = 0; i < t->number; i++)
            t->token[i] = d.token[d.lead ? d.lead[i] : i], t->position[i]++, t->row_count[i]++;
        d.token += d.number, d.logprob += d.number;
    }
}

/* Copies some columns of rows of the cache in all layers onto other rows; none is both. */
void NAME(copy_rows)(const Model *m, int64_t n, const int64_t *source, const int64_t *target, int64_t first,
                     int64_t columns) {
    for (long l = 0; l < m->layers; l++)
        for (long at = 0; at < 2 * n * m->key_heads; at++) {
            long row = at / m->key_heads % n, head = at % m->key_heads, is_value = at / (n * m->key_heads);
            number *own = m->layer[l].own;
            memcpy(place(m, own, m->own_slots, m->own_columns, target[row], head, is_value) + first * m->head_width,
                   place(m, own, m->own_slots, m->own_columns, source[row], head, is_value) + first * m->head_width,
                   columns * m->head_width * sizeof(number));
        }
}

/* y = x @ weight.T + bias: (n, width) and (columns, width) to (n, columns). */
void NAME(multiply_rows)(int64_t n, const float *x, int64_t width, const Linear *by, float *y, int64_t columns,
                   int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        multiply(of, n, x, width, *by, y, columns, columns, 0);
    }
}

/* A weight (columns, inner) and where its panels are. */
typedef struct {
    const number *weight;
    float *panels;
    int64_t columns, inner;
} Laid;

/* Some weights as panels. */
void NAME(lay_panels)(int64_t n, const Laid *laid, int64_t threads) {
#pragma omp parallel num_threads(threads)
    for (long i = 0; i < n; i++)
        lay((Share){omp_get_thread_num(), omp_get_num_threads()}, laid[i].weight, laid[i].columns, laid[i].inner,
            laid[i].panels);
}

#ifndef BFLOAT16
/* Columns of a panel, for the one who gives them. */
int64_t panel_width(void) { return PANEL; }
#endif
