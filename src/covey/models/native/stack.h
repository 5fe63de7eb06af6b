/* What the layers of a small model are told of a pass. */

#pragma once

#include "attention.h"

/* A layer's weights, or their gradients; biases are null where there are none. */
typedef struct {
    float *norm, *query, *key, *value, *query_bias, *key_bias, *value_bias;
    float *mlp_norm, *out, *gate, *up, *down;
} Weights;

typedef struct {
    Attention attention; /* of each layer in turn: its heads and gradients lie elsewhere in each */
    int64_t layers, tokens, width, inner, adds; /* whether weights' gradients are added to */
    float epsilon;
    const int64_t *position;      /* (T) */
    const float *cosines, *sines; /* of every position, (positions, head width) */
    const Weights *weights;
    const float *norm;
    float *x;            /* (T, width): embeddings, which the last hidden states replace */
    float *const *kept;  /* stack_kept() numbers for each layer, and for what is behind the last */
    float *const *gated; /* (3, T, inner) for each layer */
    float *scratch;      /* stack_scratch() numbers, of which attention_scratch() are in front for each thread */
    /* Weights as a forward pass multiplies by them, stack_panels() numbers for each layer, or for all in turn. */
    float *panels;
    int64_t has_all_panels, is_laid; /* whether they are in them already */
    const float *grad;               /* of the last hidden states */
    float *grad_x;                   /* of what tokens are embedded as */
    const int64_t *token;            /* (T) */
    float *grad_embedding;           /* (vocabulary, width), which is added to; or null */
    const Weights *grads;            /* null where there is none to be made */
    float *grad_norm;
    /* Keys and values of the tokens before these, and what is added to their gradients: (layers, past, 2 key heads,
       head width). Of these tokens, for what goes on from them, (layers, T, ...), or null; and their gradients. */
    int64_t past;
    const float *past_keys;
    float *grad_past_keys, *keys;
    const float *grad_keys;
} Stack;

/* Numbers that a layer keeps for its backward pass; that its weights take as panels; that a pass needs besides. */
int64_t stack_kept(const Stack *);

int64_t stack_panels(const Stack *);

int64_t stack_scratch(const Stack *, int is_backward);

void stack_forward(const Stack *);

void stack_backward(const Stack *);
