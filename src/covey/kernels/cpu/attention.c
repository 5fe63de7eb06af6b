/* Attention of a stream, forward and backward: a segment sees itself causally and the whole of its ancestors.

   Segments that grow from one root are a family, listed as the tree is walked, and a thread takes one key head of one
   family at a time: what it adds to the gradients of keys and values is its own. On its way it holds the keys and
   values from the root to the segment at hand by position; a branch overwrites what another one had behind their
   parting. Of the softmax only log of the sum of exp is kept. */

#include <string.h>

#include "attention.h"
#include "products.h"

/* Queries whose scores exist at a time. */
enum { QUERIES = 4 * PANEL_ROWS };

/* One key head of all tokens of an array, and of its gradient. */
typedef struct {
    long line;
    const float *key, *value;
    float *to_key, *to_value;
} Keys;

/* One key head of a family: its keys and values in the stream, and by position from the root to the segment at hand,
   as rows and as panels for products with queries. Panels hold zeros behind the last position. */
typedef struct {
    long line, out_line, width, repeats;
    float scaling;
    Keys own, past;
    float *keys, *values, *key_panels, *value_panels, *grad_keys, *grad_values, *scores, *slopes;
} Head;

/* Where a segment begins in the array that it is in. */
typedef struct {
    long start, length, before, is_past;
} Segment;

static long padded(long count) { return (count + PANEL - 1) / PANEL * PANEL; }

int64_t attention_scratch(const Attention *t) { return padded(t->longest) * (6 * t->head_width + 2 * QUERIES); }

static void lay_rows(const float *from, long line, long width, Segment s, float *rows, float *panels) {
    for (long l = 0; l < s.length; l++) {
        long at = s.before + l;
        float *column = panels + at / PANEL * width * PANEL + at % PANEL;
        for (long d = 0; d < width; d++) column[d * PANEL] = from[l * line + d];
        memcpy(rows + at * width, from + l * line, width * sizeof(float));
    }
    for (long at = s.before + s.length; at % PANEL; at++)
        for (long d = 0; d < width; d++) panels[(at / PANEL * width + d) * PANEL + at % PANEL] = 0;
}

/* y = a @ b of rows of a and a number of panels, by one thread. */
static void whole_product(long rows, long panels, Product p) {
    for (long i = 0; i < panels; i++) {
        if (p.row == 1) panel_task(p, i, 0, rows, 1, p.next, p.line);
        else if (p.line == PANEL) panel_task(p, i, 0, rows, p.row, 1, PANEL);
        else panel_task(p, i, 0, rows, p.row, 1, p.line);
    }
}

/* y = a @ keys (or values) of the first `columns` positions */
static void against_rows(long rows, const float *a, long row, Head h, const float *panels, long columns, float *y) {
    whole_product(rows, columns / PANEL,
                  (Product){.a = a, .row = row, .next = 1, .b = panels, .panel = h.width * PANEL, .line = PANEL,
                            .inner = h.width, .y = y, .stride = columns});
}

/* y = weights @ keys (or values) of the first `seen` positions */
static void along_rows(long rows, const float *weights, long columns, Head h, const float *b, long seen, float *y,
                       long stride) {
    whole_product(rows, h.width / PANEL,
                  (Product){.a = weights, .row = columns, .next = 1, .b = b, .panel = PANEL, .line = h.width,
                            .inner = seen, .y = y, .stride = stride});
}

/* grad[l] += sum over queries of weights[q][l] * x[q] */
static void across_queries(long queries, const float *weights, long columns, const float *x, long line, long seen,
                           Head h, float *grad) {
    whole_product(seen, h.width / PANEL,
                  (Product){.a = weights, .row = 1, .next = columns, .b = x, .panel = PANEL, .line = line,
                            .inner = queries, .y = grad, .stride = h.width, .adds = 1});
}

static void hide(float *score, long seen, long columns) {
    for (long l = seen; l < columns; l++) score[l] = -INFINITY;
}

/* Softmax of scaled scores in place; returns log of the sum of exp. */
static float softmax(float *score, long columns, float scaling) {
    vec peak = each(-INFINITY), mass = {0};
    for (long l = 0; l < columns; l += LANES) peak = larger(peak, load(score + l));
    float highest = peak[0];
    for (int i = 1; i < LANES; i++) highest = peak[i] > highest ? peak[i] : highest;
    for (long l = 0; l < columns; l += LANES) {
        vec weight = exponential((load(score + l) - highest) * scaling);
        store(score + l, weight);
        mass += weight;
    }
    float total = sum(mass);
    for (long l = 0; l < columns; l += LANES) store(score + l, load(score + l) / total);
    return highest * scaling + logf(total);
}

static void forward_head(const Attention *t, Head h, Segment s, long head) {
    for (long from = 0; from < s.length; from += QUERIES) {
        long queries = s.length - from < QUERIES ? s.length - from : QUERIES;
        long seen = s.before + from + queries, columns = padded(seen), token = s.start + from;
        against_rows(queries, t->x + token * h.line + head * h.width, h.line, h, h.key_panels, columns, h.scores);
        for (long q = 0; q < queries; q++) {
            hide(h.scores + q * columns, s.before + from + q + 1, columns);
            t->lse[(token + q) * t->heads + head] = softmax(h.scores + q * columns, columns, h.scaling);
        }
        along_rows(queries, h.scores, columns, h, h.values, seen, t->out + token * h.out_line + head * h.width,
                   h.out_line);
    }
}

static void backward_head(const Attention *t, Head h, Segment s, long head) {
    for (long from = 0; from < s.length; from += QUERIES) {
        long queries = s.length - from < QUERIES ? s.length - from : QUERIES;
        long seen = s.before + from + queries, columns = padded(seen), token = s.start + from;
        const float *query = t->x + token * h.line + head * h.width;
        const float *grad = t->grad + token * h.out_line + head * h.width;
        against_rows(queries, query, h.line, h, h.key_panels, columns, h.scores);
        against_rows(queries, grad, h.out_line, h, h.value_panels, columns, h.slopes);
        for (long q = 0; q < queries; q++) {
            float *score = h.scores + q * columns, *slope = h.slopes + q * columns;
            float lse = t->lse[(token + q) * t->heads + head];
            hide(score, s.before + from + q + 1, columns);
            vec along = {0}, mass = {0};
            for (long l = 0; l < columns; l += LANES) {
                vec weight = exponential(load(score + l) * h.scaling - lse);
                store(score + l, weight);
                mass += weight;
                along += weight * load(slope + l);
            }
            /* The log rounds, so that weights do not quite sum to 1, and slopes that are alike would not cancel. */
            float mean = sum(along) / sum(mass);
            for (long l = 0; l < columns; l += LANES)
                store(slope + l, load(score + l) * (load(slope + l) - mean) * h.scaling);
        }
        along_rows(queries, h.slopes, columns, h, h.keys, seen, t->grad_x + token * h.line + head * h.width, h.line);
        across_queries(queries, h.scores, columns, grad, h.out_line, seen, h, h.grad_values);
        across_queries(queries, h.slopes, columns, query, h.line, seen, h, h.grad_keys);
    }
}

static void hand_row(const float *from, long width, int adds, float *to) {
    for (long d = 0; d < width; d++) to[d] = adds ? to[d] + from[d] : from[d];
}

/* What has been added up for a segment, once everything that grows from it has been. */
static void hand_out(Head h, Segment s) {
    Keys to = s.is_past ? h.past : h.own;
    for (long l = 0; l < s.length && to.to_key; l++) {
        hand_row(h.grad_keys + (s.before + l) * h.width, h.width, s.is_past, to.to_key + (s.start + l) * to.line);
        hand_row(h.grad_values + (s.before + l) * h.width, h.width, s.is_past, to.to_value + (s.start + l) * to.line);
    }
}

static Keys keys_of(const float *x, float *grad_x, long line, long key, long value) {
    Keys k = {.line = line, .key = x + key, .value = x + value};
    if (grad_x) k.to_key = grad_x + key, k.to_value = grad_x + value;
    return k;
}

static Head head_of(const Attention *t, long key_head, float *held) {
    long width = t->head_width, rows = padded(t->longest) * width, scores = padded(t->longest) * QUERIES;
    long key = key_head * width, value = key + t->key_heads * width, queries = t->heads * width;
    Head h = {.line = queries + 2 * t->key_heads * width, .out_line = queries, .width = width,
              .repeats = t->heads / t->key_heads, .scaling = t->scaling};
    h.own = keys_of(t->x, t->grad_x, h.line, queries + key, queries + value);
    if (t->past) h.past = keys_of(t->past_keys, t->grad_past_keys, 2 * t->key_heads * width, key, value);
    float **parts[] = {&h.keys, &h.values, &h.key_panels, &h.value_panels, &h.grad_keys, &h.grad_values};
    for (int i = 0; i < 6; i++) *parts[i] = held + i * rows;
    h.scores = held + 6 * rows, h.slopes = h.scores + scores;
    return h;
}

static Segment segment_of(const Attention *t, long i) {
    int is_past = t->start[i] < t->past;
    return (Segment){t->start[i] - (is_past ? 0 : t->past), t->length[i], t->before[i], is_past};
}

static void family_head(const Attention *t, long family, long key_head, float *held, int is_backward) {
    Head h = head_of(t, key_head, held);
    long latest = -1;
    for (long i = t->family[family]; i <= t->family[family + 1]; i++) {
        long parent = i < t->family[family + 1] ? t->parent[i] : -1;
        for (; latest != parent; latest = t->parent[latest])
            if (is_backward) hand_out(h, segment_of(t, latest));
        if (i == t->family[family + 1]) break;
        Segment s = segment_of(t, i);
        Keys from = s.is_past ? h.past : h.own;
        lay_rows(from.key + s.start * from.line, from.line, h.width, s, h.keys, h.key_panels);
        lay_rows(from.value + s.start * from.line, from.line, h.width, s, h.values, h.value_panels);
        if (is_backward) {
            memset(h.grad_keys + s.before * h.width, 0, s.length * h.width * sizeof(float));
            memset(h.grad_values + s.before * h.width, 0, s.length * h.width * sizeof(float));
        }
        for (long head = key_head * h.repeats; !s.is_past && head < (key_head + 1) * h.repeats; head++) {
            if (is_backward) backward_head(t, h, s, head);
            else forward_head(t, h, s, head);
        }
        latest = i;
    }
}

static void all_heads(const Attention *t, int is_backward) {
#pragma omp parallel num_threads(t->threads)
    {
        float *held = t->held + omp_get_thread_num() * attention_scratch(t);
#pragma omp for schedule(dynamic)
        for (long task = 0; task < t->families * t->key_heads; task++)
            family_head(t, task / t->key_heads, task % t->key_heads, held, is_backward);
    }
}

void attend(const Attention *t) { all_heads(t, 0); }

void attend_backward(const Attention *t) { all_heads(t, 1); }
