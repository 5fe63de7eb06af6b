/* Attention of a stream, forward and backward: a segment sees itself causally and the whole of its parent.

   Segments that share a parent are a family, and a thread takes one key head of one family at a time: what it adds
   to the gradients of keys and values is its own. Of the softmax only log of the sum of exp is kept. */

#include "products.h"

/* Queries whose scores exist at a time. */
enum { QUERIES = 4 * PANEL_ROWS };

typedef struct {
    int64_t heads, key_heads, head_width, families, threads, scratch;
    float scaling;
    const int64_t *family, *start, *length, *parent_start, *parent_length; /* of segments, by family */
    const float *x;       /* (T, heads + 2 key heads, head width) */
    float *out, *lse;     /* (T, heads, head width), (T, heads) */
    const float *grad;    /* like out */
    float *grad_x, *held; /* like x; `scratch` numbers for each thread */
} Attention;

/* The operands of one key head of a family. */
typedef struct {
    long line, out_line, width, repeats;
    float scaling;
    const float *key, *value;
    float *grad_key, *grad_value;
} Head;

/* Keys or values of a row, as panels for products with queries; columns up to `padded` hold zeros. */
typedef struct {
    long count, padded;
    float *keys, *values;
} Rows;

static long padded(long count) { return (count + PANEL - 1) / PANEL * PANEL; }

static void lay_across(const float *from, long line, long width, Rows rows, float *panels) {
    for (long l = 0; l < rows.padded; l++)
        for (long d = 0; d < width; d++)
            panels[(l / PANEL * width + d) * PANEL + l % PANEL] = l < rows.count ? from[l * line + d] : 0;
}

/* y = a @ b of rows of a and a number of panels, by one thread. */
static void whole_product(long rows, long panels, Product p) {
    for (long i = 0; i < panels; i++) {
        if (p.row == 1) panel_task(p, i, 0, rows, 1, p.next, p.line);
        else if (p.line == PANEL) panel_task(p, i, 0, rows, p.row, 1, PANEL);
        else panel_task(p, i, 0, rows, p.row, 1, p.line);
    }
}

/* rows of a times the panels of parent and own keys (or values), side by side. */
static void against_rows(long rows, const float *a, long row, long width, const float *parent, long parent_columns,
                         const float *own, long own_columns, float *y) {
    Product p = {.a = a, .row = row, .next = 1, .b = parent, .panel = width * PANEL, .line = PANEL, .inner = width,
                 .y = y, .stride = parent_columns + own_columns};
    whole_product(rows, parent_columns / PANEL, p);
    p.b = own, p.y = y + parent_columns;
    whole_product(rows, own_columns / PANEL, p);
}

/* y = weights @ rows of parent and of the segment itself, of keys or values as they lie. */
static void along_rows(long rows, const float *weights, long columns, long parent_columns, const float *parent,
                       long parent_count, const float *own, long own_count, Head h, float *y, long stride) {
    Product p = {.a = weights, .row = columns, .next = 1, .b = parent, .panel = PANEL, .line = h.line,
                 .inner = parent_count, .y = y, .stride = stride};
    if (parent_count) whole_product(rows, h.width / PANEL, p);
    p.a = weights + parent_columns, p.b = own, p.inner = own_count, p.adds = parent_count > 0;
    whole_product(rows, h.width / PANEL, p);
}

/* grad[l] += sum over queries of weights[q][l] * x[q] */
static void across_queries(long queries, const float *weights, long columns, const float *x, long line, long count,
                           Head h, float *grad) {
    Product p = {.a = weights, .row = 1, .next = columns, .b = x, .panel = PANEL, .line = line, .inner = queries,
                 .y = grad, .stride = h.line, .adds = 1};
    whole_product(count, h.width / PANEL, p);
}

/* Scores of a query that sees nothing of the columns between what its parent and it itself have. */
static void hide(float *score, long parent_count, long parent_columns, long seen, long columns) {
    for (long l = parent_count; l < parent_columns; l++) score[l] = -INFINITY;
    for (long l = parent_columns + seen; l < columns; l++) score[l] = -INFINITY;
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

typedef struct {
    long start, length, parent_start, parent_length;
} Segment;

INLINE Segment segment(const Attention *t, long s) {
    return (Segment){t->start[s], t->length[s], t->parent_start[s], t->parent_length[s]};
}

static void forward_head(const Attention *t, Head h, Segment s, Rows parent, Rows own, long head, float *scores) {
    for (long from = 0; from < s.length; from += QUERIES) {
        long queries = s.length - from < QUERIES ? s.length - from : QUERIES;
        long seen = from + queries, own_columns = padded(seen), columns = parent.padded + own_columns;
        long token = s.start + from;
        const float *query = t->x + token * h.line + head * h.width;
        against_rows(queries, query, h.line, h.width, parent.keys, parent.padded, own.keys, own_columns, scores);
        for (long q = 0; q < queries; q++) {
            hide(scores + q * columns, parent.count, parent.padded, from + q + 1, columns);
            t->lse[(token + q) * t->heads + head] = softmax(scores + q * columns, columns, h.scaling);
        }
        along_rows(queries, scores, columns, parent.padded, h.value + s.parent_start * h.line, parent.count,
                   h.value + s.start * h.line, seen, h, t->out + token * h.out_line + head * h.width, h.out_line);
    }
}

static void backward_head(const Attention *t, Head h, Segment s, Rows parent, Rows own, long head, float *scores,
                          float *slopes) {
    for (long from = 0; from < s.length; from += QUERIES) {
        long queries = s.length - from < QUERIES ? s.length - from : QUERIES;
        long seen = from + queries, own_columns = padded(seen), columns = parent.padded + own_columns;
        long token = s.start + from;
        const float *query = t->x + token * h.line + head * h.width;
        const float *grad = t->grad + token * h.out_line + head * h.width;
        against_rows(queries, query, h.line, h.width, parent.keys, parent.padded, own.keys, own_columns, scores);
        against_rows(queries, grad, h.out_line, h.width, parent.values, parent.padded, own.values, own_columns, slopes);
        for (long q = 0; q < queries; q++) {
            float *score = scores + q * columns, *slope = slopes + q * columns;
            float lse = t->lse[(token + q) * t->heads + head];
            hide(score, parent.count, parent.padded, from + q + 1, columns);
            vec along = {0};
            for (long l = 0; l < columns; l += LANES) {
                vec weight = exponential(load(score + l) * h.scaling - lse);
                store(score + l, weight);
                along += weight * load(slope + l);
            }
            float mean = sum(along);
            for (long l = 0; l < columns; l += LANES)
                store(slope + l, load(score + l) * (load(slope + l) - mean) * h.scaling);
        }
        const float *key = h.key + s.start * h.line, *parent_key = h.key + s.parent_start * h.line;
        along_rows(queries, slopes, columns, parent.padded, parent_key, parent.count, key, seen, h,
                   t->grad_x + token * h.line + head * h.width, h.line);
        long to_parent = s.parent_start * h.line, to_own = s.start * h.line, at = parent.padded;
        across_queries(queries, scores, columns, grad, h.out_line, parent.count, h, h.grad_value + to_parent);
        across_queries(queries, scores + at, columns, grad, h.out_line, seen, h, h.grad_value + to_own);
        across_queries(queries, slopes, columns, query, h.line, parent.count, h, h.grad_key + to_parent);
        across_queries(queries, slopes + at, columns, query, h.line, seen, h, h.grad_key + to_own);
    }
}

static Rows rows_of(Head h, long start, long count, int with_values, float **held) {
    Rows rows = {count, padded(count), *held, 0};
    lay_across(h.key + start * h.line, h.line, h.width, rows, rows.keys);
    *held += rows.padded * h.width;
    if (with_values) {
        rows.values = *held;
        lay_across(h.value + start * h.line, h.line, h.width, rows, rows.values);
        *held += rows.padded * h.width;
    }
    return rows;
}

static void family_head(const Attention *t, long family, long key_head, float *held, int is_backward) {
    long width = t->head_width, to_key = (t->heads + key_head) * width, to_value = to_key + t->key_heads * width;
    Head h = {.line = (t->heads + 2 * t->key_heads) * width, .out_line = t->heads * width, .width = width,
              .repeats = t->heads / t->key_heads, .scaling = t->scaling, .key = t->x + to_key, .value = t->x + to_value};
    if (is_backward) h.grad_key = t->grad_x + to_key, h.grad_value = t->grad_x + to_value;
    Rows parent = {0};
    long laid = -1;
    for (long i = t->family[family]; i < t->family[family + 1]; i++) {
        Segment s = segment(t, i);
        float *left = held;
        /* Siblings lie one behind the other and share what is laid of their parent. */
        if (s.parent_length && laid != s.parent_start) {
            parent = rows_of(h, s.parent_start, s.parent_length, is_backward, &left);
            laid = s.parent_start;
        } else if (s.parent_length) {
            left += parent.padded * width * (is_backward ? 2 : 1);
        }
        Rows none = {0}, own = rows_of(h, s.start, s.length, is_backward, &left);
        for (long g = key_head * h.repeats; g < (key_head + 1) * h.repeats; g++) {
            if (is_backward)
                backward_head(t, h, s, s.parent_length ? parent : none, own, g, left,
                              left + QUERIES * (parent.padded + own.padded));
            else
                forward_head(t, h, s, s.parent_length ? parent : none, own, g, left);
        }
    }
}

static void all_heads(const Attention *t, int is_backward) {
#pragma omp parallel num_threads(t->threads)
    {
        float *held = t->held + omp_get_thread_num() * t->scratch;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < t->families * t->key_heads; task++)
            family_head(t, task / t->key_heads, task % t->key_heads, held, is_backward);
    }
}

void attend(const Attention *t) { all_heads(t, 0); }

void attend_backward(const Attention *t) { all_heads(t, 1); }

/* Queries whose scores exist at a time, for the one who gives scratch. */
int64_t queries(void) { return QUERIES; }
