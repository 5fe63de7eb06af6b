/* The passes of an optimizer step through a small model in one call: each forward and, where the slopes of its loss are
   known, backward, with the activations of one pass at a time. A prompt that several passes have in common is computed
   before the first of them and once; its backward pass comes behind the last one's. */

#include <stdlib.h>
#include <string.h>

#include "head.h"
#include "stack.h"

/* What a micro-batch holds, the tokens of its prompt with it. Of `prompt` tokens in front, which passes around it have in
   common with it, 0 are no such ones. */
typedef struct {
    int64_t tokens, contexts, chosen, families, longest, prompt, is_followed;
    const int64_t *token, *position, *family, *start, *length, *before, *parent;
    const int64_t *token_of, *context_of, *target;          /* (contexts), (chosen), (chosen) */
    const float *temperature, *grad_logprob, *grad_entropy; /* (chosen); gradients may be null, or not yet known */
    float *logprob, *entropy;                               /* (chosen), which are written */
} Pass;

typedef struct {
    Stack stack; /* with what every pass is told */
    Head head;
    int64_t passes, is_backward, known_tokens; /* rows of `embedding` */
    const Pass *pass;
    const float *embedding;
    const float *watched; /* some of the gradients, copied before the first pass and behind each */
    int64_t num_watched;
    float *copies;
    int (*measure)(int64_t pass); /* writes the gradients of a pass that has been forward; not 0 to stop; or null */
} Passes;

/* Memory that is given back together. */
typedef struct Piece {
    struct Piece *next;
    int64_t unused; /* what follows is aligned */
} Piece;

typedef struct {
    Piece *last;
    int has_failed;
} Pieces;

/* What a prompt takes, or any other pass. */
typedef struct {
    float **kept, **gated, *x, *grad, *grad_x, *head;
} Room;

typedef struct {
    const Passes *all;
    Pieces pieces;
    Room pass, prompt;
    float *panels, *scratch, *head_panels, *head_scratch, *keys, *grad_keys;
    /* What a call of the head is asked: chosen tokens of one pass, or of several that their prompt predicts. */
    int64_t *token_of, *context_of, *target;
    float *temperature, *logprob, *entropy, *grad_logprob, *grad_entropy;
    int is_laid;
} Run;

static const int64_t ONE_FAMILY[2] = {0, 1};

static void *piece(Pieces *pieces, long bytes) {
    Piece *made = malloc(sizeof(Piece) + bytes);
    if (!made) return pieces->has_failed = 1, NULL;
    made->next = pieces->last;
    pieces->last = made;
    return made + 1;
}

static float *floats(Pieces *pieces, long count) { return piece(pieces, count * sizeof(float)); }

static long larger_of(long a, long b) { return a > b ? a : b; }

static Room room_of(Run *r, long tokens, long contexts) {
    Stack s = r->all->stack;
    s.tokens = tokens;
    long layers = s.layers, row = s.width + r->all->head.vocab + 2;
    Pieces *pieces = &r->pieces;
    Room room = {.kept = piece(pieces, (layers + 1) * sizeof(float *)), .gated = piece(pieces, layers * sizeof(float *))};
    room.x = floats(pieces, tokens * s.width), room.grad = floats(pieces, tokens * s.width);
    room.grad_x = floats(pieces, tokens * s.width), room.head = floats(pieces, contexts * row);
    for (long i = 0; i <= layers && !pieces->has_failed; i++) room.kept[i] = floats(pieces, stack_kept(&s));
    for (long i = 0; i < layers && !pieces->has_failed; i++) room.gated[i] = floats(pieces, 3 * tokens * s.inner);
    return room;
}

/* Memory for the largest pass and the longest prompt. */
static void make_room(Run *r) {
    const Passes *all = r->all;
    Stack s = all->stack;
    long prompt = 0, contexts = 1, chosen = 0;
    for (long i = 0; i < all->passes; i++) {
        const Pass *p = all->pass + i;
        s.tokens = larger_of(s.tokens, larger_of(p->prompt, p->tokens - p->prompt));
        s.attention.longest = larger_of(s.attention.longest, p->longest);
        prompt = larger_of(prompt, p->prompt), contexts = larger_of(contexts, p->contexts), chosen += p->chosen;
    }
    Pieces *pieces = &r->pieces;
    long keys = s.layers * prompt * 2 * s.attention.key_heads * s.attention.head_width;
    r->pass = room_of(r, s.tokens, contexts), r->prompt = room_of(r, prompt, 1);
    r->panels = floats(pieces, s.layers * stack_panels(&s));
    r->scratch = floats(pieces, larger_of(stack_scratch(&s, 0), stack_scratch(&s, 1)));
    r->head_panels = floats(pieces, all->head.vocab * s.width);
    r->head_scratch = floats(pieces, contexts * (s.width + all->head.vocab + 2));
    r->keys = floats(pieces, keys), r->grad_keys = floats(pieces, keys);
    r->token_of = piece(pieces, contexts * sizeof(int64_t));
    r->context_of = piece(pieces, chosen * sizeof(int64_t)), r->target = piece(pieces, chosen * sizeof(int64_t));
    float **parts[] = {&r->temperature, &r->logprob, &r->entropy, &r->grad_logprob, &r->grad_entropy};
    for (int i = 0; i < 5; i++) *parts[i] = floats(pieces, chosen);
}

/* What the layers are told of a pass behind its prompt, or of the prompt. */
static Stack stack_of(const Run *r, const Pass *p, int is_prompt) {
    Stack s = r->all->stack;
    const Room *room = is_prompt ? &r->prompt : &r->pass;
    long first = is_prompt ? 0 : p->prompt;
    Attention *a = &s.attention;
    a->families = is_prompt ? 1 : p->families, a->family = is_prompt ? ONE_FAMILY : p->family;
    a->longest = is_prompt ? p->prompt : p->longest;
    a->start = p->start, a->length = p->length, a->before = p->before, a->parent = p->parent;
    s.tokens = is_prompt ? p->prompt : p->tokens - first;
    s.token = p->token + first, s.position = p->position + first;
    s.x = room->x, s.grad = room->grad, s.grad_x = room->grad_x, s.kept = room->kept, s.gated = room->gated;
    s.panels = r->panels, s.scratch = r->scratch, s.has_all_panels = 1, s.is_laid = r->is_laid;
    if (is_prompt) s.keys = r->keys, s.grad_keys = r->grad_keys;
    else if (first) s.past = first, s.past_keys = r->keys, s.grad_past_keys = r->grad_keys;
    return s;
}

/* Whether a chosen token is predicted by the prompt that its pass has in common with others. */
static int is_first(const Pass *p, long n) { return p->token_of[p->context_of[n]] < p->prompt; }

/* What the head is told: of all first tokens behind a prompt, or of the other tokens of a pass. */
static Head head_of(Run *r, const Pass *p, long passes, int is_prompt) {
    Head h = r->all->head;
    const Room *room = is_prompt ? &r->prompt : &r->pass;
    long before = 0;
    while (before < p->contexts && p->token_of[before] < p->prompt) before++;
    h.tokens = is_prompt ? p->prompt : p->tokens - p->prompt, h.contexts = is_prompt ? 1 : p->contexts - before;
    if (is_prompt) r->token_of[0] = p->prompt - 1;
    for (long u = before; u < p->contexts && !is_prompt; u++) r->token_of[u - before] = p->token_of[u] - p->prompt;
    for (const Pass *of = p; of < p + passes; of++)
        for (long n = 0; n < of->chosen; n++) {
            if (is_first(of, n) != is_prompt) continue;
            r->context_of[h.chosen] = is_prompt ? 0 : of->context_of[n] - before;
            r->target[h.chosen] = of->target[n], r->temperature[h.chosen] = of->temperature[n];
            if (of->grad_logprob) r->grad_logprob[h.chosen] = of->grad_logprob[n];
            if (of->grad_entropy) r->grad_entropy[h.chosen] = of->grad_entropy[n];
            h.chosen++;
        }
    h.token_of = r->token_of, h.context_of = r->context_of, h.target = r->target, h.temperature = r->temperature;
    h.logprob = r->logprob, h.entropy = r->entropy, h.panels = r->head_panels;
    h.hidden = room->x, h.taken = room->head, h.grad_taken = r->head_scratch, h.grad_hidden = room->grad;
    if (p->grad_logprob) h.grad_logprob = r->grad_logprob;
    if (p->grad_entropy) h.grad_entropy = r->grad_entropy;
    return h;
}

static int forward(Run *r, const Pass *p, long passes, int is_prompt) {
    Stack s = stack_of(r, p, is_prompt);
    for (long t = 0; t < s.tokens; t++) {
        if (s.token[t] < 0 || s.token[t] >= r->all->known_tokens) return 1;
        memcpy(s.x + t * s.width, r->all->embedding + s.token[t] * s.width, s.width * sizeof(float));
    }
    stack_forward(&s);
    r->is_laid = 1;
    Head h = head_of(r, p, passes, is_prompt);
    if (head_forward(&h)) return 1;
    long found = 0;
    for (const Pass *of = p; of < p + passes; of++)
        for (long n = 0; n < of->chosen; n++)
            if (is_first(of, n) == is_prompt) of->logprob[n] = r->logprob[found], of->entropy[n] = r->entropy[found++];
    return 0;
}

static void backward(Run *r, const Pass *p, long passes, int is_prompt) {
    Head h = head_of(r, p, passes, is_prompt);
    head_backward(&h);
    Stack s = stack_of(r, p, is_prompt);
    stack_backward(&s);
}

static void copy_watched(const Passes *all, long row) {
    memcpy(all->copies + row * all->num_watched, all->watched, all->num_watched * sizeof(float));
}

/* Passes that begin with the same prompt, or a single one; what is returned is run_passes()'. */
static int run_some(Run *r, const Pass *p, long passes) {
    const Passes *all = r->all;
    if (p->prompt) {
        if (forward(r, p, passes, 1)) return 1;
        long width = 2 * all->stack.attention.key_heads * all->stack.attention.head_width;
        memset(r->grad_keys, 0, all->stack.layers * p->prompt * width * sizeof(float));
    }
    for (const Pass *of = p; of < p + passes; of++) {
        /* Completions of one token need none but the prompt. */
        int has_own = of->tokens > of->prompt, is_last = of == p + passes - 1;
        if (has_own && forward(r, of, 1, 0)) return 1;
        if (!all->is_backward) continue;
        if (all->measure && all->measure(of - all->pass)) return 3;
        if (has_own) backward(r, of, 1, 0);
        if (is_last && p->prompt) backward(r, p, passes, 1);
        copy_watched(all, of - all->pass + 1);
    }
    return 0;
}

/* 1 where a token, a context or a target does not exist, 2 without memory, 3 where slopes could not be measured:
   gradients are not to be used then. */
int run_passes(const Passes *all) {
    Run run = {.all = all};
    make_room(&run);
    int failed = run.pieces.has_failed ? 2 : 0;
    if (!failed && all->is_backward) copy_watched(all, 0);
    for (long i = 0, next; i < all->passes && !failed; i = next) {
        for (next = i + 1; all->pass[next - 1].is_followed; next++) {}
        failed = run_some(&run, all->pass + i, next - i);
    }
    for (Piece *last = run.pieces.last, *next; last; last = next) next = last->next, free(last);
    return failed;
}
