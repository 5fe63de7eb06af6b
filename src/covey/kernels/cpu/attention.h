/* What `attend` takes: the segments of a stream, and where heads and gradients lie. */

#pragma once

#include <stdint.h>

typedef struct {
    int64_t heads, key_heads, head_width, families, threads, longest; /* tokens from a root to the end of a segment */
    float scaling;
    const int64_t *family, *start, *length, *before, *parent; /* of segments; `before` are tokens of ancestors */
    const float *x;       /* (T, heads + 2 key heads, head width) */
    float *out, *lse;     /* (T, heads, head width), (T, heads) */
    const float *grad;    /* like out */
    float *grad_x, *held; /* like x; attention_scratch() numbers for each thread */
    /* Segments that end by token `past` of the stream are in none of these arrays: they have no queries, and their keys
       and values are in `past_keys`, (past, 2 key heads, head width), to whose gradients is added. */
    int64_t past;
    const float *past_keys;
    float *grad_past_keys;
} Attention;

void attend(const Attention *);

void attend_backward(const Attention *);

/* Numbers that a thread needs. */
int64_t attention_scratch(const Attention *);
