/* A block of a large model's head, some contexts by a part of the vocabulary: from the products of hidden states and
   weights what they add to a softmax, and the loss's derivative by them, each in one pass over memory. What
   `covey.kernels.torch_.head` does in torch. Products are float32, or with BFLOAT16 defined bfloat16; all else is
   float32. */

#include <float.h>

#include "products.h"

typedef struct {
    int64_t contexts, columns, first_context, first_column, cells, threads;
    number *products;                     /* (contexts, columns) */
    const float *factor;                  /* (contexts): a logit is a product times it */
    const int64_t *context_of, *token_of; /* (cells): the cells that tokens are chosen from, of all blocks */
    float *logit;                         /* (cells): of those of this block */
    float *peak, *mass, *moment;          /* (contexts): largest logit, sums of e^(logit - peak) and of that times it */
    /* What follows is for the derivative. */
    const float *normaliser, *entropy;     /* (contexts) */
    const float *by_logprob, *by_entropy;  /* (contexts): the loss's derivatives by what is of a context */
    const float *by_cell;                  /* (cells): by the log-probability of a cell */
} Block;

/* The cell's place in the block if it lies in contexts first to last of it; otherwise -1. */
INLINE long place_of(const Block *b, long cell, long first, long last) {
    long c = b->context_of[cell] - b->first_context, v = b->token_of[cell] - b->first_column;
    return c >= first && c < last && v >= 0 && v < b->columns ? c * b->columns + v : -1;
}

/* The last numbers of a row, fewer than a vector, and behind them one of which nothing comes. */
INLINE vec last_logits(const number *from, long count, float factor) {
    vec logit = each(-FLT_MAX);
    for (long i = 0; i < count; i++) logit[i] = value_of(from[i]) * factor;
    return logit;
}

INLINE void store_numbers(number *to, vec x) {
#ifdef BFLOAT16
    *(numbers *)to = __builtin_convertvector((uints)all_rounded(x) >> 16, numbers);
#else
    store(to, x);
#endif
}

static void add_context(const Block *b, long c) {
    const number *row = b->products + c * b->columns;
    float factor = b->factor[c], before = b->peak[c], peak = before;
    long whole = b->columns / LANES * LANES;
    vec top = each(before), last = last_logits(row + whole, b->columns - whole, factor);
    for (long v = 0; v < whole; v += LANES) top = larger(top, load_numbers(row + v) * factor);
    top = larger(top, last);
    for (int i = 0; i < LANES; i++) peak = top[i] > peak ? top[i] : peak;
    vec below = last - peak, weight = exponential(below), mass = weight, moment = weight * below;
    for (long v = 0; v < whole; v += LANES) {
        below = load_numbers(row + v) * factor - peak, weight = exponential(below);
        mass += weight;
        moment += weight * below;
    }
    float fall = before - peak, kept = expf(fall);
    b->moment[c] = kept * (b->moment[c] + b->mass[c] * fall) + sum(moment);
    b->mass[c] = kept * b->mass[c] + sum(mass);
    b->peak[c] = peak;
}

void NAME(block_add)(const Block *b) {
#pragma omp parallel num_threads(b->threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long first, last = share(of, b->contexts, 1, &first);
        for (long c = first; c < last; c++) add_context(b, c);
        for (long i = 0; i < b->cells; i++) {
            long place = place_of(b, i, first, last);
            if (place >= 0) b->logit[i] = value_of(b->products[place]) * b->factor[place / b->columns];
        }
    }
}

/* With H the entropy and p a probability, the derivative of log p by the logits is [is chosen] - p, and that of H is
   -p (log p + H); this is without the first term. */
INLINE vec slopes(const Block *b, long c, vec logit) {
    vec logprob = logit - b->normaliser[c], by = each(b->by_logprob[c]);
    if (b->by_entropy) by += (logprob + b->entropy[c]) * b->by_entropy[c];
    return -exponential(logprob) * by * b->factor[c];
}

static void slope_context(const Block *b, long c) {
    number *row = b->products + c * b->columns;
    float factor = b->factor[c];
    long whole = b->columns / LANES * LANES;
    for (long v = 0; v < whole; v += LANES) store_numbers(row + v, slopes(b, c, load_numbers(row + v) * factor));
    vec last = slopes(b, c, last_logits(row + whole, b->columns - whole, factor));
    for (long v = whole; v < b->columns; v++) row[v] = nearest(last[v - whole]);
}

/* Slopes are written over the products. A cell is there once; its logit is what block_add has found. */
void NAME(block_slope)(const Block *b) {
#pragma omp parallel num_threads(b->threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long first, last = share(of, b->contexts, 1, &first);
        for (long c = first; c < last; c++) slope_context(b, c);
        for (long i = 0; b->by_cell && i < b->cells; i++) {
            long place = place_of(b, i, first, last), c = place / b->columns;
            if (place < 0) continue;
            b->products[place] = nearest(slopes(b, c, each(b->logit[i]))[0] + b->by_cell[i] * b->factor[c]);
        }
    }
}

/* to += what is of the same size. */
void NAME(add_to_sum)(float *to, const number *from, int64_t count, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long first, last = share(of, count, LANES, &first), i = first;
        for (; i + LANES <= last; i += LANES) store(to + i, load(to + i) + load_numbers(from + i));
        for (; i < last; i++) to[i] += value_of(from[i]);
    }
}
