/* Products in bfloat16 by a processor's tiles (Intel AMX): sixteen rows of a weight with sixteen rows of x in one
   instruction, so that a pass over few rows takes no longer than reading the weight.

   A tile of the weight is loaded as it lies; x is laid in pairs of numbers for each of its rows side by side. */

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Rows of a tile, and numbers of one of its rows. */
enum { TILE = 16, TILE_INNER = 32, TILE_CELLS = TILE * TILE };

/* Whether the system lets this process use tiles, for which it has to be asked (ARCH_REQ_XCOMP_PERM of Linux). */
static int has_tiles(void) {
    static int known = -1;
    if (known < 0) known = !syscall(SYS_arch_prctl, 0x1023, 18);
    return known;
}

/* Tiles 0 to 3 are sums of two groups of columns with two blocks of rows, 4 and 5 of the weight, 6 and 7 of x. */
static void shape_tiles(int columns) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int t = 0; t < 8; t++) shape.bytes[t] = 64, shape.rows[t] = t < 6 ? columns : TILE;
    _tile_loadconfig(&shape);
}

/* out[2 * group + block][column][row], for one or two groups and blocks, as is known when this is compiled. */
INLINE void tile_dots(int groups, int blocks, const number *w, long width, const number *x, float *out) {
    const number *next_w = w + TILE * width, *next_x = x + TILE * width;
    _tile_zero(0);
    if (blocks > 1) _tile_zero(1);
    if (groups > 1) _tile_zero(2);
    if (groups > 1 && blocks > 1) _tile_zero(3);
    for (long k = 0; k < width; k += TILE_INNER) {
        _tile_loadd(4, w + k, 2 * width);
        _tile_loadd(6, x + k * TILE, 64);
        if (groups > 1) _tile_loadd(5, next_w + k, 2 * width);
        if (blocks > 1) _tile_loadd(7, next_x + k * TILE, 64);
        for (int c = 0; c < groups * TILE; c++) __builtin_prefetch(w + (groups * TILE + c) * width + k);
        _tile_dpbf16ps(0, 4, 6);
        if (groups > 1) _tile_dpbf16ps(2, 5, 6);
        if (blocks > 1) _tile_dpbf16ps(1, 4, 7);
        if (groups > 1 && blocks > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 64);
    if (blocks > 1) _tile_stored(1, out + TILE_CELLS, 64);
    if (groups > 1) _tile_stored(2, out + 2 * TILE_CELLS, 64);
    if (groups > 1 && blocks > 1) _tile_stored(3, out + 3 * TILE_CELLS, 64);
}

static void some_tile_dots(int groups, int blocks, const number *w, long width, const number *x, float *out) {
    if (groups > 1 && blocks > 1) tile_dots(2, 2, w, width, x, out);
    else if (groups > 1) tile_dots(2, 1, w, width, x, out);
    else if (blocks > 1) tile_dots(1, 2, w, width, x, out);
    else tile_dots(1, 1, w, width, x, out);
}

/* Rows of x, which have been rounded, in blocks of TILE: pairs of numbers, of each row one, then the next pairs. */
static void lay_pairs(const float *x, long n, long width, number *laid) {
    const loose_bits *bits = (const loose_bits *)x;
    loose_bits *pairs = (loose_bits *)laid;
    memset(laid, 0, (n + TILE - 1) / TILE * TILE * width * sizeof(number));
    for (long r = 0; r < n; r++)
        for (long k = 0; k < width; k += 2)
            pairs[r / TILE * TILE * width / 2 + k / 2 * TILE + r % TILE] =
                bits[r * width + k] >> 16 | (bits[r * width + k + 1] & 0xffff0000u);
}

/* Write sums[column][row] of some rows and up to TILE columns as rows, or add them. */
static void put_tile(const float *sums, int rows, int columns, const float *bias, float *y, long stride, int adds) {
    __mmask16 inside = (1u << columns) - 1;
    __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                        _mm512_set1_epi32(TILE));
    vec added = bias ? (vec)_mm512_maskz_loadu_ps(inside, bias) : (vec){0};
    for (int r = 0; r < rows; r++) {
        vec value = all_rounded((vec)_mm512_i32gather_ps(places, sums + r, 4) + added);
        if (adds) value = all_rounded((vec)_mm512_maskz_loadu_ps(inside, y + r * stride) + value);
        _mm512_mask_storeu_ps(y + r * stride, inside, (__m512)value);
    }
}

/* As `product`, for a width that tiles divide. */
static void tile_product(long n, const float *x, long width, const number *w, const float *bias, float *y, long stride,
                         long first, long last, int adds) {
    long chunk = CHUNK / width / TILE * TILE;
    if (chunk < TILE) chunk = TILE;
    number laid[((chunk < n ? chunk : n) + TILE - 1) / TILE * TILE * width];
    float sums[4 * TILE_CELLS] = {0};
    for (long from = 0; from < n; from += chunk) {
        long rows = n - from < chunk ? n - from : chunk;
        lay_pairs(x + from * width, rows, width, laid);
        shape_tiles(TILE);
        for (long c = first; c < last;) {
            long left = last - c;
            int groups = left >= 2 * TILE ? 2 : 1, columns = left < TILE ? left : TILE;
            if (columns < TILE) shape_tiles(columns);
            for (long r = 0; r < rows; r += 2 * TILE) {
                int blocks = rows - r > TILE ? 2 : 1;
                some_tile_dots(groups, blocks, w + c * width, width, laid + r * width, sums);
                for (int g = 0; g < groups; g++)
                    for (int b = 0; b < blocks; b++) {
                        long at = r + b * TILE, some = rows - at < TILE ? rows - at : TILE, column = c + g * TILE;
                        put_tile(sums + (2 * g + b) * TILE_CELLS, some, columns, bias ? bias + column : 0,
                                 y + (from + at) * stride + column, stride, adds);
                    }
            }
            c += groups * columns;
        }
    }
    _tile_release();
}
