/* What the head of a small model is told of a pass. */

#pragma once

#include <stdint.h>

typedef struct {
    int64_t tokens, contexts, chosen, width, vocab, threads;
    const float *hidden, *weight;                   /* (T, width), (V, width) */
    const int64_t *token_of, *context_of, *target;  /* (U), (N), (N) */
    const float *temperature;                       /* (N) */
    float *taken, *logprobs, *entropies, *divisors; /* kept, in one piece: (U, width), (U, V), (U), (U) */
    float *panels, *logprob, *entropy;              /* (V, width), (N), (N) */
    const float *grad_logprob, *grad_entropy;       /* (N), or null */
    float *grad_taken, *slopes, *factors;           /* scratch, in one piece: (U, width), (U, V), (2, U) */
    float *grad_hidden, *grad_weight;               /* (T, width); (V, width) or null */
    int64_t adds;                                   /* whether the weight's gradient is added to */
} Head;

/* 1 where a target or a context does not exist: nothing is computed then. */
int head_forward(const Head *);

void head_backward(const Head *);
