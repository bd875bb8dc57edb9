/* Products of bfloat16 numbers on AMX tiles: W by strips of 16 outputs, or of 32 if there are more than 32 rows of x, and
 * each strip by stretches of 256 inputs.
 *
 * A stretch is expanded into a buffer, and multiplied with all rows of x while the next one is expanded. `prepare` has
 * packed x into tiles. A tile of sums has 16 outputs by up to 16 rows of x, and a result is the same sequence of sums
 * whatever the number of rows and whichever outputs share a tile, so its bits do not depend on them.
 */

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum {
    TILE_ROWS = 16,
    TILE_VALUES = TILE_ROWS * TILE_ROWS,
    STRETCH = 256,          /* values of a row expanded at a time: what two buffers may take of the nearest cache */
    STRIDE = STRETCH + 32,  /* of a buffer, so that a tile's rows lie in different sets of that cache */
    AHEAD_BYTES = 384,      /* of a row are fetched before they are expanded */
    FEW_TILES = 2,          /* of x, with one of W, have their sums in registers all the while */
    MOST_TILES = 32,        /* of x that W is expanded for at a time, */
    PANEL = 4               /* and strips whose sums stay in the second cache meanwhile */
};

/* The processor's tile registers by number. Own statements, not the compiler's: theirs do not say that they read memory. */
#define TILE_LOAD(t, p, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define SUM_LOAD(t) TILE_LOAD(t, sums[t], 64);
#define SUM_STORE(t) TILE_STORE(t, sums[t], 64);
#define SUM_ZERO(t) TILE_ZERO(t);
#define FOUR(X) X(0) X(1) X(2) X(3)
#define TILE_FUSE(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)

/* Linux grants the tiles' state to a process that asks, for all of its threads. */
static int tiles_granted(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
    return 0;
#endif
}

/* Sixteen rows of sixteen numbers of 32 bits become columns: blocks of 1, 2, 4 and 8 change places across the diagonal. */
BRAIN void transpose(__m512i v[TILE_ROWS]) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    _Pragma("GCC unroll 4") for (int size = 1; size < TILE_ROWS; size *= 2) {
        const __m512i block = _mm512_set1_epi32(size), from_second = _mm512_set1_epi32(TILE_ROWS);
        const __mmask16 odd = _mm512_test_epi32_mask(lane, block);
        const __m512i even_blocks = _mm512_mask_add_epi32(lane, odd, _mm512_sub_epi32(lane, block), from_second);
        const __m512i odd_blocks = _mm512_add_epi32(even_blocks, block);
        _Pragma("GCC unroll 16") for (int i = 0; i < TILE_ROWS; i++) {
            if (i & size) continue;
            __m512i a = v[i], b = v[i + size];
            v[i] = _mm512_permutex2var_epi32(a, even_blocks, b);
            v[i + size] = _mm512_permutex2var_epi32(a, odd_blocks, b);
        }
    }
}

static int64_t columns_amx(int64_t count) { return count < TILE_ROWS ? count : TILE_ROWS; }
static int64_t tiles_amx(int64_t count) { return (count + TILE_ROWS - 1) / TILE_ROWS; }

static int64_t prepared_amx(int64_t count, int64_t inputs) {
    return prepare_units(inputs) * tiles_amx(count) * columns_amx(count) * PAIRED * 2;
}

/* For every 16 rows of x the tiles of its stretches of 32 inputs: 16 pairs of values by the columns, which are the rows. */
static BRAIN_TARGET void prepare_amx(const void *task, int64_t first, int64_t last) {
    const struct product *p = task;
    const int64_t columns = columns_amx(p->count), units = prepare_units(p->inputs);
    const __mmask16 some = (__mmask16)((1 << columns) - 1);
    for (int64_t m = 0; m < p->count; m += TILE_ROWS)
        for (int64_t u = first; u < last; u++) {
            const int64_t values = p->inputs - u * PAIRED;
            const __mmask32 inside = values < PAIRED ? (1u << values) - 1 : ~0u;
            uint32_t *out = (uint32_t *)p->scratch + (m / TILE_ROWS * units + u) * columns * TILE_ROWS;
            __m512i v[TILE_ROWS];
            for (int r = 0; r < TILE_ROWS; r++) {
                const uint16_t *x = (const uint16_t *)p->x + (m + r) * p->x_stride + u * PAIRED;
                v[r] = m + r < p->count ? _mm512_maskz_loadu_epi16(inside, x) : _mm512_setzero_si512();
            }
            if (columns == 1) {
                _mm512_storeu_si512(out, v[0]);
                continue;
            }
            transpose(v);
            for (int j = 0; j < TILE_ROWS; j++) _mm512_mask_storeu_epi32(out + j * columns, some, v[j]);
        }
}

BRAIN void configure_tiles(int64_t columns) {
    enum { W_TILE = 4, W_TILES = 2, TILES = 8 };
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } ALIGNED c = {.palette = 1};
    for (int t = 0; t < TILES; t++) {
        c.rows[t] = TILE_ROWS;
        c.bytes[t] = (uint16_t)(t / W_TILES * W_TILES == W_TILE ? 64 : 4 * columns);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(c));
}

/* Rows n, n + spacing, ... of W that are expanded together. */
struct strip {
    int64_t n, spacing, rows;
};

/* For a few rows of x, all depends on how fast W is read: a range of its rows is taken in 16 parts, of which each strip
 * has one row. That makes 16 long streams of reads, which the processor recognises and fetches ahead, where 16 neighbours
 * would be short ones. The rest, less than 16, are neighbours, as are the strips for many rows of x: results that lie side
 * by side are stored together. */
static struct strip strip_of(int64_t first, int64_t last, int64_t number, int64_t most) {
    int64_t part = (last - first) / TILE_ROWS, n = first + number * most;
    if (most > TILE_ROWS) return (struct strip){n, 1, last - n < most ? last - n : most};
    if (number < part) return (struct strip){first + number, part, TILE_ROWS};
    return (struct strip){n, 1, last - n};
}

/* A stretch of W, expanded, that is to be multiplied with many tiles of x: two of them at a time, a group. It takes a step
 * for each unit of 32 inputs in each group. The sums of a group wait in `sums` for the next stretch. */
struct pass {
    struct strip strip;
    const uint16_t *w;
    const char *x;
    float (*sums)[4][TILE_VALUES];
    int64_t m, tiles, units, steps; /* m: the first row of x */
    int64_t done, group, unit;
    int first, last; /* stretch of the strip */
};

/* A tile of sums: 16 outputs of the strip from `part` on, of rows m, m + 1, ... of x. A few columns lie without gaps. */
static BRAIN_TARGET __attribute__((noinline)) void put_tile(const struct product *p, const float *sums, struct strip strip, int64_t part, int64_t m) {
    int64_t rows = strip.rows - part < TILE_ROWS ? strip.rows - part : TILE_ROWS, n = strip.n + part * strip.spacing;
    const int64_t columns = columns_amx(p->count);
    __m512i v[TILE_ROWS];
    if (columns < TILE_ROWS) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i index = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)columns));
        for (int64_t j = 0; j < columns; j++) v[j] = _mm512_i32gather_epi32(index, sums + j, 4);
    } else {
        for (int r = 0; r < TILE_ROWS; r++) v[r] = _mm512_load_si512(sums + r * TILE_ROWS);
        transpose(v);
    }
    float bias[TILE_ROWS] ALIGNED = {0};
    if (p->bias)
        for (int64_t r = 0; r < rows; r++) bias[r] = p->bias[n + r * strip.spacing];
    uint16_t values[TILE_ROWS][TILE_ROWS] ALIGNED;
    for (int64_t j = 0; j < columns; j++) {
        __m512 sum = _mm512_castsi512_ps(v[j]);
        if (p->bias) sum = sum + _mm512_load_ps(bias);
        _mm256_store_si256((__m256i *)values[j], (__m256i)_mm512_cvtneps_pbh(sum));
    }
    for (int64_t j = 0; j < TILE_ROWS && m < p->count; j++, m++) {
        uint16_t *y = (uint16_t *)p->y + m * p->y_stride + n;
        if (strip.spacing == 1 && rows == TILE_ROWS) memcpy(y, values[j], sizeof(values[j]));
        else
            for (int64_t r = 0; r < rows; r++) y[r * strip.spacing] = values[j][r];
    }
}

/* The sums of a group are complete. */
static BRAIN_TARGET __attribute__((noinline)) void put_group(const struct product *p, const struct pass *s) {
    for (int64_t tile = 2 * s->group; tile < 2 * s->group + 2 && tile < s->tiles; tile++)
        for (int64_t part = 0; part < s->strip.rows; part += TILE_ROWS)
            put_tile(p, s->sums[s->group][(tile & 1) + 2 * (part / TILE_ROWS)], s->strip, part, s->m + tile * TILE_ROWS);
}

/* Steps of a pass, `until` so many are done. */
BRAIN void fuse_tiles(const struct product *p, struct pass *s, int64_t until) {
    const int64_t unit_bytes = TILE_ROWS * 64;
    for (; s->done < until; s->done++) {
        float(*sums)[TILE_VALUES] = s->sums[s->group];
        const uint16_t *w = s->w + s->unit * PAIRED;
        const char *x = s->x + (2 * s->group * prepare_units(p->inputs) + s->unit) * unit_bytes;
        if (s->unit == 0 && s->first) {
            FOUR(SUM_ZERO)
        } else if (s->unit == 0) {
            FOUR(SUM_LOAD)
        }
        TILE_LOAD(4, w, STRIDE * 2);
        TILE_LOAD(5, w + TILE_ROWS * STRIDE, STRIDE * 2);
        TILE_LOAD(6, x, 64);
        TILE_FUSE(0, 4, 6);
        TILE_FUSE(2, 5, 6);
        if (2 * s->group + 1 < s->tiles) {
            TILE_LOAD(7, x + unit_bytes * prepare_units(p->inputs), 64);
            TILE_FUSE(1, 4, 7);
            TILE_FUSE(3, 5, 7);
        }
        if (++s->unit < s->units) continue;
        FOUR(SUM_STORE)
        if (s->last) put_group(p, s);
        s->unit = 0, s->group++;
    }
}

typedef void (*stretch_function)(const uint8_t *w, int64_t values, uint16_t *out);

/* For up to two tiles of x: their sums stay in registers from stretch to stretch. While one stretch is expanded the one
 * before is multiplied: neither waits for the other. `bytes` of a stretch. */
BRAIN void multiply_few(const struct product *p, int64_t first, int64_t last, const stretch_function expand, const int64_t bytes) {
    uint16_t buffers[2][TILE_ROWS][STRIDE] ALIGNED;
    float sums[FEW_TILES][TILE_VALUES] ALIGNED;
    const int64_t stretches = (p->inputs + STRETCH - 1) / STRETCH, strips = (last - first + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t columns = columns_amx(p->count), unit_bytes = columns * 64, tiles = tiles_amx(p->count);
    const char *x = p->scratch, *x_before = x;
    const int64_t second = prepare_units(p->inputs) * unit_bytes;
    int64_t before = 0; /* units of the stretch before */
    struct strip strip = {0}, strip_before;
    FOUR(SUM_ZERO)
    for (int64_t number = 0, pass = 0; number <= strips; number++) {
        strip_before = strip, strip = strip_of(first, last, number, TILE_ROWS);
        for (int64_t s = 0; s < stretches; s++, pass++) {
            int64_t values = p->inputs - s * STRETCH < STRETCH ? p->inputs - s * STRETCH : STRETCH;
            int64_t rows = number < strips ? strip.rows : 0;
            const uint8_t *w = p->weight + strip.n * p->row_bytes + s * bytes;
            for (int r = 0; r < TILE_ROWS; r++, w += strip.spacing * p->row_bytes) {
                if (r < rows) {
                    UNROLL for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + AHEAD_BYTES + line);
                    expand(w, values, buffers[pass & 1][r]);
                }
                if (r % 2 && r / 2 < before) {
                    TILE_LOAD(4, buffers[~pass & 1][0] + r / 2 * PAIRED, STRIDE * 2);
                    TILE_LOAD(6, x_before + r / 2 * unit_bytes, columns * 4);
                    TILE_FUSE(0, 4, 6);
                    if (tiles > 1) {
                        TILE_LOAD(7, x_before + second + r / 2 * unit_bytes, columns * 4);
                        TILE_FUSE(1, 4, 7);
                    }
                }
            }
            if (s == 0 && number) {
                TILE_STORE(0, sums[0], columns * 4);
                if (tiles > 1) TILE_STORE(1, sums[1], columns * 4);
                FOUR(SUM_ZERO)
                for (int64_t tile = 0; tile < tiles; tile++) put_tile(p, sums[tile], strip_before, 0, tile * TILE_ROWS);
            }
            if (number == strips) return;
            before = prepare_units(values), x_before = x + s * (STRETCH / PAIRED) * unit_bytes;
        }
    }
}

/* For more, tile to tile + tiles - 1 of x: their sums wait in the second cache. */
BRAIN void multiply_many(const struct product *p, int64_t first, int64_t last, int64_t tile, int64_t tiles,
                          const stretch_function expand, const int64_t bytes) {
    uint16_t buffers[2][2 * TILE_ROWS][STRIDE] ALIGNED;
    float sums[PANEL][MOST_TILES / 2][4][TILE_VALUES] ALIGNED;
    enum { ROWS = 2 * TILE_ROWS };
    const int64_t strips = (last - first + ROWS - 1) / ROWS, unit_bytes = TILE_ROWS * 64;
    const char *x = (const char *)p->scratch + tile * prepare_units(p->inputs) * unit_bytes;
    struct pass now = {.steps = 0};
    int turn = 0;
    for (int64_t start = 0; start < strips; start += PANEL)
        for (int64_t k = 0; k < p->inputs; k += STRETCH)
            for (int64_t number = start; number < start + PANEL && number < strips; number++, turn ^= 1) {
                const int64_t values = p->inputs - k < STRETCH ? p->inputs - k : STRETCH;
                const struct strip strip = strip_of(first, last, number, ROWS);
                const uint8_t *w = p->weight + strip.n * p->row_bytes + k / STRETCH * bytes;
                const int64_t next_panel = PANEL * ROWS * p->row_bytes - k / STRETCH * bytes;
                const int64_t ahead = k + STRETCH < p->inputs ? bytes : next_panel;
                struct pass before = now;
                for (int64_t r = 0; r < ROWS; r++, w += strip.spacing * p->row_bytes) {
                    if (r < strip.rows) {
                        UNROLL for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + ahead + line);
                        expand(w, values, buffers[turn][r]);
                    }
                    fuse_tiles(p, &before, before.steps * (r + 1) / ROWS);
                }
                now = (struct pass){
                    .strip = strip, .w = buffers[turn][0], .x = x + k * unit_bytes / PAIRED, .sums = sums[number - start],
                    .m = tile * TILE_ROWS, .tiles = tiles, .units = prepare_units(values),
                    .steps = prepare_units(values) * ((tiles + 1) / 2), .first = k == 0, .last = k + values == p->inputs,
                };
            }
    fuse_tiles(p, &now, now.steps);
}

BRAIN void multiply_all(const struct product *p, int64_t first, int64_t last, const stretch_function expand, const int64_t bytes) {
    const int64_t tiles = tiles_amx(p->count), blocks = (tiles + MOST_TILES - 1) / MOST_TILES;
    if (first >= last) return;
    configure_tiles(columns_amx(p->count));
    if (tiles <= FEW_TILES) multiply_few(p, first, last, expand, bytes);
    else
        for (int64_t b = 0; b < blocks; b++) {
            int64_t tile = tiles * b / blocks;
            multiply_many(p, first, last, tile, tiles * (b + 1) / blocks - tile, expand, bytes);
        }
    __asm__ volatile("tilerelease");
}

#define FORMAT(t, VALUES, SIZE, LENGTH)                                                              \
    static BRAIN_TARGET void multiply_##t##_amx(const void *task, int64_t first, int64_t last) {    \
        multiply_all(task, first, last, stretch_##t, STRETCH / VALUES * SIZE);                       \
    }
#include "list.h"
#undef FORMAT

#define FORMAT(t, VALUES, SIZE, LENGTH) {multiply_##t##_amx, expand_##t##_avx512},
static const struct kernels table_amx[] = {
#include "list.h"
};
#undef FORMAT
