/* The language-model head of a small model: log-probability and entropy of chosen tokens, forward and backward, each in
   one call. What `covey.models.head` computes where one block holds all logits.

   T tokens, U contexts, V vocabulary, N chosen tokens; V and the width are multiples of PANEL. */

#include "head.h"
#include "products.h"

/* With the parts of what is in one piece. */
static Head with_parts(const Head *given) {
    Head h = *given;
    long hidden = h.contexts * h.width, logits = h.contexts * h.vocab;
    h.logprobs = h.taken + hidden, h.entropies = h.logprobs + logits, h.divisors = h.entropies + h.contexts;
    if (h.grad_taken) h.slopes = h.grad_taken + hidden, h.factors = h.slopes + logits;
    return h;
}

/* Whether every token and context exists. */
static int is_known(const Head *h) {
    for (long u = 0; u < h->contexts; u++)
        if (h->token_of[u] < 0 || h->token_of[u] >= h->tokens) return 0;
    for (long n = 0; n < h->chosen; n++)
        if (h->target[n] < 0 || h->target[n] >= h->vocab || h->context_of[n] < 0 || h->context_of[n] >= h->contexts)
            return 0;
    return 1;
}

/* Logits become log-probabilities. */
static void log_softmax(const Head *h, long context) {
    float *row = h->logprobs + context * h->vocab;
    vec divisor = each(h->divisors[context]), peak = each(-INFINITY), mass = {0}, moment = {0};
    for (long v = 0; v < h->vocab; v += LANES) {
        vec logit = load(row + v) / divisor;
        store(row + v, logit);
        peak = larger(peak, logit);
    }
    float highest = peak[0];
    for (int i = 1; i < LANES; i++) highest = peak[i] > highest ? peak[i] : highest;
    for (long v = 0; v < h->vocab; v += LANES) {
        vec below = load(row + v) - highest, weight = exponential(below);
        mass += weight;
        moment += weight * below;
    }
    float total = sum(mass), log_mass = logf(total);
    for (long v = 0; v < h->vocab; v += LANES) store(row + v, load(row + v) - highest - log_mass);
    h->entropies[context] = log_mass - sum(moment) / total;
}

/* 1 where a target or a context does not exist: nothing is computed then. */
int head_forward(const Head *given) {
    if (!is_known(given)) return 1;
    Head parts = with_parts(given), *h = &parts;
    for (long u = 0; u < h->contexts; u++) h->divisors[u] = 1;
    for (long n = 0; n < h->chosen; n++) h->divisors[h->context_of[n]] = h->temperature[n];
#pragma omp parallel num_threads(h->threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = h->width, first, last = share(of, h->contexts, 1, &first);
        for (long u = first; u < last; u++)
            memcpy(h->taken + u * width, h->hidden + h->token_of[u] * width, width * sizeof(float));
        lay(of, h->weight, h->vocab, width, h->panels);
#pragma omp barrier
        panel_product(of, h->contexts, h->vocab,
                      (Product){.a = h->taken, .row = width, .next = 1, .b = h->panels, .panel = width * PANEL,
                                .line = PANEL, .inner = width, .y = h->logprobs, .stride = h->vocab});
#pragma omp barrier
        for (long u = first; u < last; u++) log_softmax(h, u);
#pragma omp barrier
        last = share(of, h->chosen, 1, &first);
        for (long n = first; n < last; n++) {
            h->logprob[n] = h->logprobs[h->context_of[n] * h->vocab + h->target[n]];
            h->entropy[n] = h->entropies[h->context_of[n]];
        }
    }
    return 0;
}

/* The derivative by the products of contexts `first` to `last`. With H their entropy and p a probability, that of
   log p by the logits is [is target] - p, and that of H is -p (log p + H). */
static void slopes_of(const Head *h, long first, long last) {
    float *by_logprob = h->factors, *by_entropy = h->factors + h->contexts;
    for (long u = first; u < last; u++) by_logprob[u] = by_entropy[u] = 0;
    for (long n = 0; n < h->chosen; n++) {
        long u = h->context_of[n];
        if (u < first || u >= last) continue;
        if (h->grad_logprob) by_logprob[u] += h->grad_logprob[n];
        if (h->grad_entropy) by_entropy[u] += h->grad_entropy[n];
    }
    for (long u = first; u < last; u++)
        for (long v = 0; v < h->vocab; v += LANES) {
            vec logprob = load(h->logprobs + u * h->vocab + v);
            vec factor = each(by_logprob[u]);
            if (h->grad_entropy) factor += (logprob + h->entropies[u]) * by_entropy[u];
            store(h->slopes + u * h->vocab + v, -exponential(logprob) * factor / h->divisors[u]);
        }
    for (long n = 0; h->grad_logprob && n < h->chosen; n++) {
        long u = h->context_of[n];
        if (u >= first && u < last) h->slopes[u * h->vocab + h->target[n]] += h->grad_logprob[n] / h->divisors[u];
    }
}

void head_backward(const Head *given) {
    Head parts = with_parts(given), *h = &parts;
    /* A product over no contexts writes nothing. */
    if (h->grad_weight && !h->contexts && !h->adds) memset(h->grad_weight, 0, h->vocab * h->width * sizeof(float));
#pragma omp parallel num_threads(h->threads)
    {
        Share of = {omp_get_thread_num(), omp_get_num_threads()};
        long width = h->width, vocab = h->vocab, first, last = share(of, h->contexts, 1, &first);
        slopes_of(h, first, last);
#pragma omp barrier
        panel_product(of, h->contexts, width,
                      (Product){.a = h->slopes, .row = vocab, .next = 1, .b = h->weight, .panel = PANEL, .line = width,
                                .inner = vocab, .y = h->grad_taken, .stride = width});
        if (h->grad_weight)
            panel_product(of, vocab, width,
                          (Product){.a = h->slopes, .row = 1, .next = vocab, .b = h->taken, .panel = PANEL,
                                    .line = width, .inner = h->contexts, .y = h->grad_weight, .stride = width,
                                    .adds = h->adds});
#pragma omp barrier
        /* A token may be several contexts': each thread adds up columns of its own. */
        last = share(of, width, LANES, &first);
        for (long t = 0; t < h->tokens; t++)
            memset(h->grad_hidden + t * width + first, 0, (last - first) * sizeof(float));
        for (long u = 0; u < h->contexts; u++)
            for (long k = first; k < last; k += LANES) {
                float *to = h->grad_hidden + h->token_of[u] * width + k;
                store(to, load(to) + load(h->grad_taken + u * width + k));
            }
    }
}
