/* Vectors, and products of rows with a weight as the learner holds it.

   A sum runs over the width in one order, whatever the number of rows beside it: a row's result does not
   depend on what it is batched with, nor on the number of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, PANEL_ROWS = 12 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS = 3, PANEL_ROWS = 6 };
#else
enum { LANES = 4, ROWS = 6, PANEL_ROWS = 8 };
#endif
/* Columns of a product that are computed together: of a weight as it lies, and of a panel. */
enum { COLUMNS = 4, PANEL = 2 * LANES, CHUNK = 1 << 16 };

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

INLINE vec load(const float *from) { return *(const loose_vec *)from; }

INLINE void store(float *to, vec x) { *(loose_vec *)to = x; }

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

/* e^x within two units in the last place; 0 below -87 and at most e^88. x = n log 2 + r, |r| <= log(2) / 2;
   the polynomial is Cephes' (expf.c). */
INLINE vec exponential(vec x) {
    ints is_zero = x < -87.0f;
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
    return (vec)((ints)(p * (vec)power) & ~is_zero);
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

/* out[r][c] = x[r] . w[c] for some rows, at compile time, and COLUMNS rows of a weight. */
INLINE void dots(int rows, const float *x, long stride, const float *w, long width, float out[ROWS][COLUMNS]) {
    vec total[ROWS][COLUMNS] = {{{0}}};
    long k = 0;
    for (; k + LANES <= width; k += LANES) {
        vec weight[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) {
            weight[c] = load(w + c * width + k);
            /* The rows that come next, which a processor does not foresee. */
            __builtin_prefetch(w + (c + COLUMNS) * width + k);
        }
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
            for (int c = 0; c < COLUMNS; c++) out[r][c] += x[r * stride + k] * w[c * width + k];
}

static void some_dots(int rows, const float *x, long stride, const float *w, long width, float out[ROWS][COLUMNS]) {
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

/* y of `rows` rows and the columns of a panel: what `dots` gives, from a weight that lies in panels,
   (columns / PANEL, width, PANEL). */
INLINE void panel_dots(int rows, const float *x, long stride, const float *panel, long width, float *out) {
    vec total[PANEL_ROWS][2] = {{{0}}};
    for (long k = 0; k < width; k++) {
        vec low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
        for (int r = 0; r < rows; r++) {
            float value = x[r * stride + k];
            total[r][0] += value * low;
            total[r][1] += value * high;
        }
    }
    for (int r = 0; r < rows; r++) {
        store(out + r * PANEL, total[r][0]);
        store(out + r * PANEL + LANES, total[r][1]);
    }
}

static int some_panel_dots(int rows, const float *x, long stride, const float *panel, long width, float *out) {
    if (rows >= PANEL_ROWS) return panel_dots(PANEL_ROWS, x, stride, panel, width, out), PANEL_ROWS;
    if (rows >= PANEL_ROWS / 2) return panel_dots(PANEL_ROWS / 2, x, stride, panel, width, out), PANEL_ROWS / 2;
    if (rows >= 2) return panel_dots(2, x, stride, panel, width, out), 2;
    return panel_dots(1, x, stride, panel, width, out), 1;
}

/* Write a block of results, or add it. */
INLINE void put(float *y, long stride, const float *out, long out_stride, int rows, int columns, const float *bias,
                int adds) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float value = out[r * out_stride + c] + (bias ? bias[c] : 0);
            y[r * stride + c] = adds ? y[r * stride + c] + value : value;
        }
}

/* Panels first to last of y = x @ w.T + bias, or what is added to y. */
static void panel_product(long n, const float *x, long width, const float *w, const float *bias, float *y, long stride,
                          long first, long last, int adds) {
    for (long p = first; p < last; p++)
        for (long r = 0; r < n;) {
            float out[PANEL_ROWS * PANEL];
            int rows = some_panel_dots(n - r, x + r * width, width, w + p * PANEL * width, width, out);
            put(y + r * stride + p * PANEL, stride, out, PANEL, rows, PANEL, bias ? bias + p * PANEL : 0, adds);
            r += rows;
        }
}

/* Columns first to last of the same, of a weight as it lies. */
static void product(long n, const float *x, long width, const float *w, const float *bias, float *y, long stride,
                    long first, long last, int adds) {
    long chunk = CHUNK / width / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    for (long from = 0; from < n; from += chunk) {
        long to = from + chunk < n ? from + chunk : n;
        for (long c = first; c < last; c += COLUMNS)
            for (long r = from; r < to; r += ROWS) {
                float out[ROWS][COLUMNS];
                int rows = to - r < ROWS ? to - r : ROWS;
                some_dots(rows, x + r * width, width, w + c * width, width, out);
                put(y + r * stride + c, stride, out[0], COLUMNS, rows, COLUMNS, bias ? bias + c : 0, adds);
            }
    }
}
