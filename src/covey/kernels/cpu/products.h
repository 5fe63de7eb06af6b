/* Vectors, and products of rows with a weight as the learner holds it: in float32, or with BFLOAT16 defined in
   bfloat16. Values are float32 throughout; `rounded` is where the modules would round.

   A sum runs over the width in one order, whatever the number of rows beside it: a row's result does not
   depend on what it is batched with, nor on the number of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, PANEL_ROWS = 12 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS = 3, PANEL_ROWS = 6 };
#else
enum { LANES = 4, ROWS = 6, PANEL_ROWS = 8 };
#endif
/* Columns of a product that are computed together: of a weight as it lies, and of a panel. */
enum { COLUMNS = 4, PANEL = 2 * LANES };
/* Numbers of x, and rows of b, that stay in the first cache. */
enum { CHUNK = 1 << 16, INNER = 512 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (four_ints){__VA_ARGS__})
#endif

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    long thread, threads;
} Share;

/* The part of `total` things, in units, that a thread takes: from *first up to what is returned. */
INLINE long share(Share of, long total, long unit, long *first) {
    long units = (total + unit - 1) / unit, last = units * (of.thread + 1) / of.threads * unit;
    *first = units * of.thread / of.threads * unit;
    return last < total ? last : total;
}

#ifdef BFLOAT16
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#define NAME(of) of##_bfloat16
#else
typedef float number;
#define NAME(of) of##_float32
#endif

INLINE vec load(const float *from) { return *(const loose_vec *)from; }

INLINE void store(float *to, vec x) { *(loose_vec *)to = x; }

#ifdef BFLOAT16
INLINE vec load_numbers(const number *from) {
    return (vec)(__builtin_convertvector(*(const numbers *)from, uints) << 16);
}

INLINE float value_of(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest number, of two as near to the even one. */
INLINE number nearest(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE float rounded(float x) { return value_of(nearest(x)); }

INLINE vec all_rounded(vec x) {
    uints bits = (uints)x;
    return (vec)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}
#else
INLINE vec load_numbers(const number *from) { return load(from); }
INLINE float value_of(number x) { return x; }
INLINE number nearest(float x) { return x; }
INLINE float rounded(float x) { return x; }
INLINE vec all_rounded(vec x) { return x; }
#endif

INLINE vec each(float x) { return x - (vec){0}; }

/* The sum of a vector's quarters or halves. */
INLINE four folded(vec x) {
#if defined(__AVX512F__)
    union { vec whole; eight part[2]; } outer = {x};
    union { eight whole; four part[2]; } inner = {outer.part[0] + outer.part[1]};
    return inner.part[0] + inner.part[1];
#elif defined(__AVX2__)
    union { vec whole; four part[2]; } inner = {x};
    return inner.part[0] + inner.part[1];
#else
    return x;
#endif
}

INLINE float sum(vec x) {
    four part = folded(x);
    return (part[0] + part[2]) + (part[1] + part[3]);
}

INLINE vec larger(vec a, vec b) {
    ints is_larger = a > b;
    return (vec)(((ints)a & is_larger) | ((ints)b & ~is_larger));
}

/* e^x within two units in the last place; 0 below -87, at most e^88, and NaN of NaN. x = n log 2 + r, |r| <= log(2) / 2;
   the polynomial is Cephes' (expf.c). */
INLINE vec exponential(vec x) {
    ints is_zero = x < -87.0f, is_number = x == x;
    vec given = x;
    x = larger(each(-87.0f), -larger(-x, each(-88.0f)));
    vec shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = each(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = ((ints)shifted - (ints)each(12582912.0f) + 127) << 23;
    ints value = (ints)(p * (vec)power) & ~is_zero;
    return (vec)((value & is_number) | ((ints)given & ~is_number));
}

/* log(x) of positive normal numbers: x = 2^n m, 1/sqrt(2) <= m < sqrt(2); the polynomial is Cephes' (logf.c). */
INLINE vec logarithm(vec x) {
    ints bits = (ints)x - 0x3f3504f3;
    vec n = __builtin_convertvector(bits >> 23, vec);
    vec m = (vec)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, square = m * m;
    vec p = each(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - n * 2.12194440e-4f - 0.5f * square;
    return m + p + n * 0.693359375f;
}

/* log(1 + x), exact for small x. */
INLINE vec logarithm_of_next(vec x) {
    vec next = 1.0f + x, rounded = next - 1.0f;
    ints is_one = next == 1.0f;
    vec divisor = (vec)(((ints)rounded & ~is_one) | ((ints)each(1.0f) & is_one));
    vec value = logarithm(next) * (x / divisor);
    return (vec)(((ints)value & ~is_one) | ((ints)x & is_one));
}

/* Sums of four vectors, side by side. */
INLINE four sums(const vec v[COLUMNS]) {
    four part[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) part[c] = folded(v[c]);
    four ab = SHUFFLE(part[0], part[1], 0, 4, 1, 5) + SHUFFLE(part[0], part[1], 2, 6, 3, 7);
    four cd = SHUFFLE(part[2], part[3], 0, 4, 1, 5) + SHUFFLE(part[2], part[3], 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

/* What rows of x are multiplied as: bfloat16, to which they have been rounded, where the processor multiplies that. */
#if defined(BFLOAT16) && defined(__AVX512BF16__)
#define MULTIPLIES_BFLOAT16
typedef number factor;
typedef uint32_t loose_bits __attribute__((may_alias));

INLINE const factor *factors(const float *x, long count, factor *held) {
    const loose_bits *bits = (const loose_bits *)x;
    for (long i = 0; i < count; i++) held[i] = bits[i] >> 16;
    return held;
}
#else
typedef float factor;

INLINE const factor *factors(const float *x, long count, factor *held) { return (void)count, (void)held, x; }
#endif

/* The rows of a weight that come next, as they lie: a processor does not foresee COLUMNS of them side by side. */
INLINE void expect(const number *w, long width, long k, long step) {
    for (int c = 0; c < COLUMNS; c++) __builtin_prefetch(w + COLUMNS * width + k * COLUMNS + c * step);
}

/* out[r][c] = x[r] . w[c] for some rows, at compile time, and COLUMNS rows of a weight. */
#ifdef MULTIPLIES_BFLOAT16
INLINE void dots(int rows, const factor *x, long stride, const number *w, long width, float out[ROWS][COLUMNS]) {
    __m512 total[ROWS][COLUMNS] = {{{0}}};
    for (long k = 0; k < width; k += 2 * LANES) {
        __mmask32 inside = width - k < 2 * LANES ? (1u << (width - k)) - 1 : -1u;
        __m512bh weight[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) weight[c] = (__m512bh)_mm512_maskz_loadu_epi16(inside, w + c * width + k);
        expect(w, width, k, 2 * LANES);
        for (int r = 0; r < rows; r++) {
            __m512bh value = (__m512bh)_mm512_maskz_loadu_epi16(inside, x + r * stride + k);
            for (int c = 0; c < COLUMNS; c++) total[r][c] = _mm512_dpbf16_ps(total[r][c], value, weight[c]);
        }
    }
    for (int r = 0; r < rows; r++) {
        vec side[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) side[c] = (vec)total[r][c];
        four side_by_side = sums(side);
        memcpy(out[r], &side_by_side, sizeof(four));
    }
}
#else
INLINE void dots(int rows, const factor *x, long stride, const number *w, long width, float out[ROWS][COLUMNS]) {
    vec total[ROWS][COLUMNS] = {{{0}}};
    long k = 0;
    for (; k + LANES <= width; k += LANES) {
        vec weight[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) weight[c] = load_numbers(w + c * width + k);
        expect(w, width, k, LANES);
        for (int r = 0; r < rows; r++) {
            vec value = load(x + r * stride + k);
            for (int c = 0; c < COLUMNS; c++) total[r][c] += value * weight[c];
        }
    }
    for (int r = 0; r < rows; r++) {
        four side_by_side = sums(total[r]);
        memcpy(out[r], &side_by_side, sizeof(four));
    }
    for (; k < width; k++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) out[r][c] += x[r * stride + k] * value_of(w[c * width + k]);
}
#endif

static void some_dots(int rows, const factor *x, long stride, const number *w, long width,
                      float out[ROWS][COLUMNS]) {
    switch (rows) {
    case 1: dots(1, x, stride, w, width, out); break;
    case 2: dots(2, x, stride, w, width, out); break;
    case 3: dots(3, x, stride, w, width, out); break;
#if !defined(__AVX2__) || defined(__AVX512F__)
    case 4: dots(4, x, stride, w, width, out); break;
    case 5: dots(5, x, stride, w, width, out); break;
#endif
    default: dots(ROWS, x, stride, w, width, out);
    }
}

/* The operands of y = a @ b, or of what is added to y: a[r][i] is at a + r * row + i * next, and panel p of b, PANEL
   columns wide, has its row i at b + p * panel + i * line. */
typedef struct {
    const float *a;
    long row, next;
    const float *b;
    long panel, line, inner;
    const float *bias;
    float *y;
    long stride;
    int adds;
} Product;

INLINE void panel_dots(int rows, const float *a, long row, long next, const float *b, long line, long inner, float *out) {
    vec total[PANEL_ROWS][2] = {{{0}}};
    for (long i = 0; i < inner; i++) {
        vec low = load(b + i * line), high = load(b + i * line + LANES);
        for (int r = 0; r < rows; r++) {
            float value = a[r * row + i * next];
            total[r][0] += value * low;
            total[r][1] += value * high;
        }
    }
    for (int r = 0; r < rows; r++) {
        store(out + r * PANEL, total[r][0]);
        store(out + r * PANEL + LANES, total[r][1]);
    }
}

/* For as many of `rows` as there is a block of; returns how many. */
INLINE int some_panel_dots(int rows, const float *a, long row, long next, const float *b, long line, long inner,
                           float *out) {
    if (rows >= PANEL_ROWS) return panel_dots(PANEL_ROWS, a, row, next, b, line, inner, out), PANEL_ROWS;
    if (rows >= PANEL_ROWS / 2) return panel_dots(PANEL_ROWS / 2, a, row, next, b, line, inner, out), PANEL_ROWS / 2;
    if (rows >= 2) return panel_dots(2, a, row, next, b, line, inner, out), 2;
    return panel_dots(1, a, row, next, b, line, inner, out), 1;
}

INLINE four load_four(const number *from) {
    number held[4];
    memcpy(held, from, sizeof held);
    return (four){value_of(held[0]), value_of(held[1]), value_of(held[2]), value_of(held[3])};
}

/* Weights (columns, inner) as panels (columns / PANEL, inner, PANEL), four by four. */
INLINE void lay(Share of, const number *weight, long columns, long inner, float *panels) {
    long first, last = share(of, columns, PANEL, &first);
    for (long c = first; c < last; c += 4) {
        const number *w = weight + c * inner;
        float *to = panels + c / PANEL * PANEL * inner + c % PANEL;
        long i = 0;
        for (; i + 4 <= inner; i += 4) {
            four row[4], line[4];
            for (int k = 0; k < 4; k++) row[k] = load_four(w + k * inner + i);
            four low = SHUFFLE(row[0], row[1], 0, 4, 1, 5), high = SHUFFLE(row[0], row[1], 2, 6, 3, 7);
            four next_low = SHUFFLE(row[2], row[3], 0, 4, 1, 5), next_high = SHUFFLE(row[2], row[3], 2, 6, 3, 7);
            line[0] = SHUFFLE(low, next_low, 0, 1, 4, 5), line[1] = SHUFFLE(low, next_low, 2, 3, 6, 7);
            line[2] = SHUFFLE(high, next_high, 0, 1, 4, 5), line[3] = SHUFFLE(high, next_high, 2, 3, 6, 7);
            for (int k = 0; k < 4; k++) memcpy(to + (i + k) * PANEL, &line[k], sizeof(four));
        }
        for (; i < inner; i++)
            for (int k = 0; k < 4; k++) to[i * PANEL + k] = value_of(w[k * inner + i]);
    }
}

/* Write a block of results, or add it. */
INLINE void put(float *y, long stride, const float *out, long out_stride, int rows, int columns, const float *bias,
                int adds) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float value = rounded(out[r * out_stride + c] + (bias ? bias[c] : 0));
            y[r * stride + c] = adds ? rounded(y[r * stride + c] + value) : value;
        }
}

INLINE void panel_task(Product p, long panel, long first, long last, long row, long next, long line) {
    for (long from = 0; from < p.inner; from += INNER) {
        long inner = p.inner - from < INNER ? p.inner - from : INNER;
        const float *b = p.b + panel * p.panel + from * line, *bias = p.bias && !from ? p.bias + panel * PANEL : 0;
        for (long r = first; r < last;) {
            float out[PANEL_ROWS * PANEL];
            int rows = some_panel_dots(last - r, p.a + r * row + from * next, row, next, b, line, inner, out);
            put(p.y + r * p.stride + panel * PANEL, p.stride, out, PANEL, rows, PANEL, bias, p.adds || from);
            r += rows;
        }
    }
}

/* A thread's share of a product of `rows` rows and `columns` columns, a multiple of PANEL. */
__attribute__((unused)) static void panel_product(Share of, long rows, long columns, Product p) {
    long blocks = (rows + PANEL_ROWS - 1) / PANEL_ROWS, first;
    long last = share(of, columns / PANEL * blocks, 1, &first);
    while (first < last) {
        long panel = first / blocks, block = first % blocks;
        long end = (panel + 1) * blocks < last ? blocks : last - panel * blocks;
        long stop = end * PANEL_ROWS < rows ? end * PANEL_ROWS : rows;
        /* What is known when this is compiled spares registers. */
        if (p.row == 1) panel_task(p, panel, block * PANEL_ROWS, stop, 1, p.next, p.line);
        else if (p.line == PANEL) panel_task(p, panel, block * PANEL_ROWS, stop, p.row, 1, PANEL);
        else panel_task(p, panel, block * PANEL_ROWS, stop, p.row, 1, p.line);
        first = panel * blocks + end;
    }
}

#if defined(MULTIPLIES_BFLOAT16) && defined(__AMX_BF16__) && defined(__linux__)
#define MULTIPLIES_TILES
#include "tiles.h"
#endif

/* Columns first to last of the same, of a weight as it lies. */
__attribute__((unused)) static void product(long n, const float *x, long width, const number *w, const float *bias, float *y, long stride,
                    long first, long last, int adds) {
#ifdef MULTIPLIES_TILES
    if (width % TILE_INNER == 0 && has_tiles()) {
        tile_product(n, x, width, w, bias, y, stride, first, last, adds);
        return;
    }
#endif
    long chunk = CHUNK / width / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    factor held[sizeof(factor) == sizeof(float) ? 1 : (chunk < n ? chunk : n) * width];
    for (long from = 0; from < n; from += chunk) {
        long to = from + chunk < n ? from + chunk : n;
        const factor *taken = factors(x + from * width, (to - from) * width, held);
        for (long c = first; c < last; c += COLUMNS)
            for (long r = from; r < to; r += ROWS) {
                float out[ROWS][COLUMNS];
                int rows = to - r < ROWS ? to - r : ROWS;
                some_dots(rows, taken + (r - from) * width, width, w + c * width, width, out);
                put(y + r * stride + c, stride, out[0], COLUMNS, rows, COLUMNS, bias ? bias + c : 0, adds);
            }
    }
}
