/* What is done with a row's values: multiplied with activations, or stored. Included once for each instruction set,
 * after formats.h. Loops over rows, counts and lanes have constant ends and are meant to vanish.
 */

/* Shapes of a tile, written out: only with literal indices are the sums sure to stay in registers. */
#define ROWS_1(X, t) X(t, 0)
#define ROWS_2(X, t) X(t, 0) X(t, 1)
#define ROWS_4(X, t) X(t, 0) X(t, 1) X(t, 2) X(t, 3)
#define COUNT_1(X) X(0)
#define COUNT_2(X) X(0) X(1)
#define COUNT_4(X) X(0) X(1) X(2) X(3)
#define COUNT_8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define CELLS_1(X, c) X(0, c)
#define CELLS_2(X, c) X(0, c) X(1, c)
#define CELLS_4(X, c) X(0, c) X(1, c) X(2, c) X(3, c)
#define CELLS_1_1(X) CELLS_1(X, 0)
#define CELLS_4_1(X) CELLS_4(X, 0)
#define CELLS_4_2(X) CELLS_4(X, 0) CELLS_4(X, 1)
#define CELLS_4_4(X) CELLS_4_2(X) CELLS_4(X, 2) CELLS_4(X, 3)
#define CELLS_2_4(X) CELLS_2(X, 0) CELLS_2(X, 1) CELLS_2(X, 2) CELLS_2(X, 3)
#define CELLS_2_8(X) CELLS_2_4(X) CELLS_2(X, 4) CELLS_2(X, 5) CELLS_2(X, 6) CELLS_2(X, 7)

#define ROW_START(t, r) w[r] = p->weight + (n + r) * p->row_bytes;
#define ROW_UNIT(t, r) NAME(unit_##t)(w[r], u, q[r]);
#define ROW_RUN(t, r) NAME(run_##t)(w[r], q[r], &h, r, u, i, v[r]);
#define ROW_NEXT(t, r) w[r] += size;
#define ROW_AHEAD(t, r) AHEAD(w[r] + ahead, size)
#define ROW_END(t, r) w[r] = memcpy(padded[r], w[r], (size_t)rest * (size / 16));
#define COUNT_START(c) x[c] = p->brain ? (const float *)p->scratch + (m + c) * p->inputs : (const float *)p->x + (m + c) * p->x_stride;
#define COUNT_NEXT(c) x[c] += values;
#define COUNT_END(c) x[c] = memcpy(ends[c], x[c], (size_t)rest * 4);
#define CELL_START(r, c) sum[r][c] = NAME(all)(0);
#define CELL_FUSE(r, c) sum[r][c] = NAME(fused)(v[r][j], NAME(load)(x[c] + at + j * LANES), sum[r][c]);
#define CELL_PUT(r, c) NAME(put)(p, n + r, m + c, NAME(total)(sum[r][c]));

#define STEP(t, ROWS, COUNT, offset)                                                                     \
    do {                                                                                                 \
        VECTOR v[ROWS][16 / LANES];                                                                      \
        const int64_t at = offset;                                                                       \
        ROWS_##ROWS(ROW_RUN, t)                                                                          \
        UNROLL for (int j = 0; j < 16 / LANES; j++) { CELLS_##ROWS##_##COUNT(CELL_FUSE) }                \
    } while (0)

/* ROWS weight rows from row n, times COUNT activation rows from row m. Each result is one chain of fused products, lane
 * by lane along the row, summed over the lanes at the end: the order does not depend on ROWS or COUNT, so neither do the
 * bits. What is left after whole blocks, in formats of single values, is multiplied from padded copies in the same
 * chain. */
#define TILE(t, VALUES, SIZE, LENGTH, ROWS, COUNT)                                                       \
    INLINE void NAME(tile_##t##_##ROWS##_##COUNT)(const struct product *p, int64_t n, int64_t m) {       \
        const int64_t values = VALUES, size = SIZE, ahead = 4 * p->row_bytes, blocks = p->inputs / VALUES, rest = p->inputs % VALUES; \
        NAME(head) h;                                                                                    \
        VECTOR sum[ROWS][COUNT];                                                                         \
        int8_t q[ROWS][LENGTH] ALIGNED;                                                                  \
        const uint8_t *w[ROWS];                                                                          \
        const float *x[COUNT];                                                                           \
        ROWS_##ROWS(ROW_START, t) COUNT_##COUNT(COUNT_START) CELLS_##ROWS##_##COUNT(CELL_START)          \
        for (int64_t k = 0; k < blocks; k++) {                                                           \
            ROWS_##ROWS(ROW_AHEAD, t)                                                                    \
            NAME(heads_##t)(w, &h, ROWS);                                                                \
            for (int64_t u = 0; u < VALUES / LENGTH; u++) {                                              \
                ROWS_##ROWS(ROW_UNIT, t)                                                                 \
                UNROLL for (int i = 0; i < LENGTH / 16; i++) STEP(t, ROWS, COUNT, u * LENGTH + i * 16);  \
            }                                                                                            \
            ROWS_##ROWS(ROW_NEXT, t) COUNT_##COUNT(COUNT_NEXT)                                           \
        }                                                                                                \
        if (VALUES == 16 && rest) {                                                                      \
            float ends[COUNT][16] = {{0}};                                                               \
            uint8_t padded[ROWS][64] = {{0}};                                                            \
            const int64_t u = 0;                                                                         \
            const int i = 0;                                                                             \
            ROWS_##ROWS(ROW_END, t) COUNT_##COUNT(COUNT_END)                                             \
            STEP(t, ROWS, COUNT, 0);                                                                     \
        }                                                                                                \
        CELLS_##ROWS##_##COUNT(CELL_PUT)                                                                 \
    }

/* The tiles for many activation rows, as wide as the registers allow; returns how many rows they have done. */
#if REGISTERS == 32
#define WIDE_TILES(t, VALUES, SIZE, LENGTH)                                                              \
    TILE(t, VALUES, SIZE, LENGTH, 4, 4)                                                                  \
    TILE(t, VALUES, SIZE, LENGTH, 2, 8)                                                                  \
    INLINE int64_t NAME(wide_##t)(const struct product *p, int64_t n) {                                  \
        int64_t m = 0;                                                                                   \
        for (; m + 8 <= p->count; m += 8) NAME(tile_##t##_2_8)(p, n, m), NAME(tile_##t##_2_8)(p, n + 2, m); \
        for (; m + 4 <= p->count; m += 4) NAME(tile_##t##_4_4)(p, n, m);                                 \
        return m;                                                                                        \
    }
#else
#define WIDE_TILES(t, VALUES, SIZE, LENGTH)                                                              \
    TILE(t, VALUES, SIZE, LENGTH, 2, 4)                                                                  \
    INLINE int64_t NAME(wide_##t)(const struct product *p, int64_t n) {                                  \
        int64_t m = 0;                                                                                   \
        for (; m + 4 <= p->count; m += 4) NAME(tile_##t##_2_4)(p, n, m), NAME(tile_##t##_2_4)(p, n + 2, m); \
        return m;                                                                                        \
    }
#endif

#define FORMAT(t, VALUES, SIZE, LENGTH)                                                                  \
    TILE(t, VALUES, SIZE, LENGTH, 1, 1)                                                                  \
    TILE(t, VALUES, SIZE, LENGTH, 4, 1)                                                                  \
    TILE(t, VALUES, SIZE, LENGTH, 4, 2)                                                                  \
    WIDE_TILES(t, VALUES, SIZE, LENGTH)                                                                  \
                                                                                                         \
    static TARGET void NAME(multiply_##t)(const void *task, int64_t first, int64_t last) {               \
        const struct product *p = task;                                                                  \
        int64_t n = first, m;                                                                            \
        for (; n + 4 <= last; n += 4) {                                                                  \
            m = NAME(wide_##t)(p, n);                                                                    \
            for (; m + 2 <= p->count; m += 2) NAME(tile_##t##_4_2)(p, n, m);                             \
            if (m < p->count) NAME(tile_##t##_4_1)(p, n, m);                                             \
        }                                                                                                \
        for (; n < last; n++)                                                                            \
            for (m = 0; m < p->count; m++) NAME(tile_##t##_1_1)(p, n, m);                                \
    }                                                                                                    \
                                                                                                         \
    static TARGET void NAME(expand_##t)(const void *task, int64_t first, int64_t last) {                 \
        const struct expansion *e = task;                                                                \
        for (int64_t n = first; n < last; n++) {                                                         \
            const uint8_t *w = e->weight + n * e->row_bytes;                                             \
            char *out = (char *)e->out + n * e->out_stride * (e->brain ? 2 : 4);                         \
            for (int64_t k = 0; k < e->inputs / VALUES; k++, w += SIZE) {                                \
                NAME(head) h;                                                                            \
                int8_t q[LENGTH] ALIGNED;                                                                \
                NAME(heads_##t)(&w, &h, 1);                                                              \
                for (int64_t u = 0; u < VALUES / LENGTH; u++) {                                          \
                    NAME(unit_##t)(w, u, q);                                                             \
                    UNROLL for (int i = 0; i < LENGTH / 16; i++) {                                       \
                        VECTOR v[16 / LANES];                                                            \
                        int64_t at = k * VALUES + u * LENGTH + i * 16;                                   \
                        NAME(run_##t)(w, q, &h, 0, u, i, v);                                             \
                        for (int j = 0; j < 16 / LANES; j++, at += LANES)                                \
                            if (e->brain) NAME(store_brain)((uint16_t *)out + at, v[j]);                 \
                            else NAME(store)((float *)out + at, v[j]);                                   \
                    }                                                                                    \
                }                                                                                        \
            }                                                                                            \
        }                                                                                                \
    }

#include "list.h"

#undef FORMAT

#define FORMAT(t, VALUES, SIZE, LENGTH) {NAME(multiply_##t), NAME(expand_##t)},
static const struct kernels NAME(table)[] = {
#include "list.h"
};
#undef FORMAT
