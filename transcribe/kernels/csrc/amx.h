/* Products of bfloat16 numbers on AMX tiles: 16 outputs at a time, by the stretches of 32 values.
 *
 * The tile of W is expanded into a buffer row by row; that of the activations was packed by `prepare`; that of the sums
 * has 16 outputs by up to 16 rows of x. A result is the same sequence of sums whatever the number of rows and whichever
 * outputs share a tile, so its bits do not depend on them.
 */

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum {
    TILE_ROWS = 16,
    STRETCH = 256,          /* values of a row expanded at a time: what two buffers may take of the nearest cache */
    STRIDE = STRETCH + 32,  /* of a buffer, so that a tile's rows lie in different sets of that cache */
    AHEAD_BYTES = 512,      /* of a row are fetched before they are expanded */
    MOST_TILES = 6          /* of sums; two more tiles hold the factors */
};

/* The processor's tile registers by number. Own statements, not the compiler's: theirs do not say that they read memory. */
#define TILE_LOAD(t, p, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_FUSE(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define WEIGHT_TILE 0
#define X_TILE 1
#define SUM_TILES(X) X(2, 0) X(3, 1) X(4, 2) X(5, 3) X(6, 4) X(7, 5)

/* Linux grants the tiles' state to a process that asks, for all of its threads. */
static int tiles_granted(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
    return 0;
#endif
}

static int64_t columns_amx(int64_t count) { return count < TILE_ROWS ? count : TILE_ROWS; }
static int64_t tiles_amx(int64_t count) { return (count + TILE_ROWS - 1) / TILE_ROWS; }

static int64_t prepared_amx(int64_t count, int64_t inputs) {
    return prepare_units(inputs) * tiles_amx(count) * columns_amx(count) * PAIRED * 2;
}

/* Tiles of x for each stretch of 32 inputs: 16 pairs of values by the columns, one of which is a row of x. */
static BRAIN_TARGET void prepare_amx(const void *task, int64_t first, int64_t last) {
    const struct product *p = task;
    int64_t columns = columns_amx(p->count), tiles = tiles_amx(p->count);
    for (int64_t u = first; u < last; u++) {
        int64_t values = p->inputs - u * PAIRED < PAIRED ? p->inputs - u * PAIRED : PAIRED;
        uint32_t *out = (uint32_t *)p->scratch + u * tiles * columns * TILE_ROWS;
        for (int64_t m = 0; m < tiles * columns; m++) {
            uint32_t pairs[TILE_ROWS] = {0};
            if (m < p->count) memcpy(pairs, (const uint16_t *)p->x + m * p->x_stride + u * PAIRED, (size_t)values * 2);
            uint32_t *column = out + m / columns * columns * TILE_ROWS + m % columns;
            for (int j = 0; j < TILE_ROWS; j++) column[j * columns] = pairs[j];
        }
    }
}

BRAIN void configure_tiles(int64_t columns) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } ALIGNED c = {.palette = 1};
    for (int t = 0; t < 2 + MOST_TILES; t++) c.rows[t] = TILE_ROWS, c.bytes[t] = (uint16_t)(4 * columns);
    c.bytes[WEIGHT_TILE] = 64;
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

/* Tile t of a buffer times the tiles of x. */
BRAIN void fuse_tiles(const char *buffer, const char *x, int64_t columns, int64_t tiles) {
    TILE_LOAD(0, buffer, STRIDE * 2);
#define FUSE(t, c)                                                  \
    if (c < tiles) {                                                \
        TILE_LOAD(1, x + c * columns * TILE_ROWS * 4, columns * 4); \
        TILE_FUSE(t, 0, 1);                                         \
    }
    SUM_TILES(FUSE)
#undef FUSE
}

/* Rows of W that share a tile: `rows` of them from n on, `spacing` apart. */
struct comb {
    int64_t n, spacing, rows;
};

/* A range of rows is taken in 16 parts, of which each tile has one row: that makes 16 long streams of reads, which the
 * processor recognises and fetches ahead. A tile of neighbours would be 16 short ones. The rest, less than 16, are
 * neighbours. */
BRAIN struct comb comb_of(int64_t first, int64_t last, int64_t number) {
    int64_t part = (last - first) / TILE_ROWS;
    if (number < part) return (struct comb){first + number, part, TILE_ROWS};
    return (struct comb){first + part * TILE_ROWS, 1, last - first - part * TILE_ROWS};
}

/* The sums in the tiles, for the rows of x from m on. */
BRAIN void put_tiles(const struct product *p, struct comb c, int64_t m, int64_t columns, int64_t tiles) {
    float sums[MOST_TILES][TILE_ROWS * TILE_ROWS] ALIGNED;
#define STORE(t, tile)                             \
    if (tile < tiles) {                            \
        TILE_STORE(t, sums[tile], columns * 4);    \
        TILE_ZERO(t);                              \
    }
    SUM_TILES(STORE)
#undef STORE
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i index = _mm512_mullo_epi32(count, _mm512_set1_epi32((int)columns));
    float bias[TILE_ROWS] ALIGNED = {0};
    if (p->bias)
        for (int64_t r = 0; r < c.rows; r++) bias[r] = p->bias[c.n + r * c.spacing];
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t j = 0; j < columns && m < p->count; j++, m++) {
            uint16_t *y = (uint16_t *)p->y + m * p->y_stride + c.n, values[TILE_ROWS];
            __m512 sum = _mm512_i32gather_ps(index, sums[tile] + j, 4);
            if (p->bias) sum = sum + _mm512_load_ps(bias);
            _mm256_storeu_si256((__m256i *)values, (__m256i)_mm512_cvtneps_pbh(sum));
            for (int64_t r = 0; r < c.rows; r++) y[r * c.spacing] = values[r];
        }
}

/* While the rows of a tile are expanded for one stretch, the stretch before is multiplied: neither waits for the other. */
#define FORMAT(t, VALUES, SIZE, LENGTH)                                                                               \
    BRAIN void amx_##t(const struct product *p, int64_t first, int64_t last, int64_t m, int64_t columns, int64_t tiles) { \
        uint16_t buffers[2][TILE_ROWS][STRIDE] ALIGNED;                                                               \
        const int64_t stretches = (p->inputs + STRETCH - 1) / STRETCH, combs = (last - first + TILE_ROWS - 1) / TILE_ROWS; \
        const int64_t tile_bytes = columns * TILE_ROWS * 4, unit_bytes = tiles_amx(p->count) * tile_bytes;            \
        enum { step = STRETCH / VALUES * SIZE };                                                                      \
        const char *x = (const char *)p->scratch + m / TILE_ROWS * tile_bytes, *x_before = x;                         \
        int64_t before = 0; /* units of the stretch before */                                                         \
        struct comb c = {0}, c_before;                                                                                \
        for (int64_t number = 0, pass = 0; number <= combs; number++) {                                               \
            c_before = c, c = comb_of(first, last, number);                                                           \
            for (int64_t s = 0; s < stretches; s++, pass++) {                                                         \
                int64_t values = p->inputs - s * STRETCH < STRETCH ? p->inputs - s * STRETCH : STRETCH;               \
                int64_t rows = number < combs ? c.rows : 0;                                                           \
                const uint8_t *w = p->weight + c.n * p->row_bytes + s * step;                                         \
                const char *buffer = (const char *)buffers[~pass & 1];                                                \
                for (int r = 0; r < TILE_ROWS; r++, w += c.spacing * p->row_bytes) {                                  \
                    if (r < rows) {                                                                                   \
                        UNROLL for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(w + AHEAD_BYTES + line); \
                        stretch_##t(w, values, buffers[pass & 1][r]);                                                 \
                    }                                                                                                 \
                    if (r % 2 && r / 2 < before)                                                                      \
                        fuse_tiles(buffer + r / 2 * PAIRED * 2, x_before + r / 2 * unit_bytes, columns, tiles);       \
                }                                                                                                     \
                if (s == 0 && number) put_tiles(p, c_before, m, columns, tiles);                                      \
                if (number == combs) return;                                                                          \
                before = (values + PAIRED - 1) / PAIRED, x_before = x + s * (STRETCH / PAIRED) * unit_bytes;          \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    static BRAIN_TARGET void multiply_##t##_amx(const void *task, int64_t first, int64_t last) {                      \
        const struct product *p = task;                                                                               \
        int64_t columns = columns_amx(p->count), tiles = tiles_amx(p->count);                                         \
        if (first >= last) return;                                                                                    \
        for (int64_t t = 0; t < tiles; t += MOST_TILES) {                                                             \
            configure_tiles(columns);                                                                                 \
            amx_##t(p, first, last, t * TILE_ROWS, columns, tiles - t < MOST_TILES ? tiles - t : MOST_TILES);         \
        }                                                                                                             \
        __asm__ volatile("tilerelease");                                                                              \
    }
#include "list.h"
#undef FORMAT

#define FORMAT(t, VALUES, SIZE, LENGTH) {multiply_##t##_amx, expand_##t##_avx512},
static const struct kernels table_amx[] = {
#include "list.h"
};
#undef FORMAT
