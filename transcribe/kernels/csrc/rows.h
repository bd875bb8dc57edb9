/* What is done with a row's values: multiplied with activations, or stored. Included once for each instruction set,
 * after formats.h.
 */

/* ROWS weight rows from row n, times COUNT activation rows from row m. Each result is one chain of fused products, lane by
 * lane along the row, summed over the lanes at the end: the order does not depend on ROWS or COUNT, so neither do the
 * bits. Values beyond whole blocks (formats of single values only) are multiplied from padded copies, in the same chain. */
#define STEP(t, at, weights, activations, stride)                                                        \
    do {                                                                                                 \
        VECTOR v[ROWS][16 / LANES];                                                                      \
        for (int r = 0; r < ROWS; r++) NAME(run_##t)((weights)[r], &h[r], u, i, v[r]);                   \
        for (int j = 0; j < 16 / LANES; j++)                                                             \
            for (int c = 0; c < COUNT; c++) {                                                            \
                VECTOR xs = NAME(load)((activations) + c * (stride) + (at) + j * LANES);                 \
                for (int r = 0; r < ROWS; r++)                                                           \
                    sum[r][c] = NAME(fused)(v[r][j], xs, sum[r][c]);                                     \
            }                                                                                            \
    } while (0)

#define FORMAT(t, VALUES, BYTES_OF, UNIT)                                                                \
    INLINE void NAME(tile_##t)(const struct product *p, int64_t n, int64_t m, const int ROWS,            \
                               const int COUNT) {                                                        \
        NAME(head) h[MAX_ROWS];                                                                          \
        VECTOR sum[MAX_ROWS][MAX_COUNT];                                                                 \
        const uint8_t *w[MAX_ROWS];                                                                      \
        const float *x = p->x + m * p->x_stride;                                                         \
        const int64_t blocks = p->inputs / VALUES, rest = p->inputs % VALUES;                            \
        for (int r = 0; r < ROWS; r++) {                                                                 \
            w[r] = p->weight + (n + r) * p->row_bytes;                                                   \
            for (int c = 0; c < COUNT; c++) sum[r][c] = NAME(all)(0);                                    \
        }                                                                                                \
        for (int64_t k = 0; k < blocks; k++) {                                                           \
            for (int r = 0; r < ROWS; r++) NAME(head_##t)(w[r], &h[r]);                                  \
            for (int64_t u = 0; u < VALUES / UNIT; u++)                                                  \
                _Pragma("GCC unroll 8") for (int i = 0; i < UNIT / 16; i++)                              \
                    STEP(t, k * VALUES + u * UNIT + i * 16, w, x, p->x_stride);                          \
            for (int r = 0; r < ROWS; r++) w[r] += BYTES_OF;                                             \
        }                                                                                                \
        if (VALUES == 16 && rest) {                                                                      \
            float ends[MAX_COUNT][16] = {{0}};                                                           \
            uint8_t padded[MAX_ROWS][64] = {{0}};                                                        \
            for (int c = 0; c < COUNT; c++)                                                              \
                memcpy(ends[c], x + c * p->x_stride + blocks * 16, (size_t)rest * 4);                    \
            for (int r = 0; r < ROWS; r++) {                                                             \
                memcpy(padded[r], w[r], (size_t)rest * (BYTES_OF / 16));                                 \
                w[r] = padded[r];                                                                        \
            }                                                                                            \
            const int64_t u = 0;                                                                         \
            const int i = 0;                                                                             \
            STEP(t, 0, w, &ends[0][0], 16);                                                              \
        }                                                                                                \
        for (int r = 0; r < ROWS; r++)                                                                   \
            for (int c = 0; c < COUNT; c++) put(p, n + r, m + c, NAME(total)(sum[r][c]));                \
    }                                                                                                    \
                                                                                                         \
    static TARGET void NAME(multiply_##t)(const void *task, int64_t first, int64_t last) {               \
        const struct product *p = task;                                                                  \
        int64_t n = first, m;                                                                            \
        for (; n + 4 <= last; n += 4) {                                                                  \
            for (m = 0; m + MAX_COUNT <= p->count; m += MAX_COUNT)                                       \
                for (int64_t r = 0; r < 4; r += WIDE_ROWS)                                               \
                    NAME(tile_##t)(p, n + r, m, WIDE_ROWS, MAX_COUNT);                                   \
            if (MAX_COUNT > 4 && m + 4 <= p->count) NAME(tile_##t)(p, n, m, 4, 4), m += 4;               \
            if (m + 2 <= p->count) NAME(tile_##t)(p, n, m, 4, 2), m += 2;                                \
            if (m < p->count) NAME(tile_##t)(p, n, m, 4, 1);                                             \
        }                                                                                                \
        for (; n < last; n++)                                                                            \
            for (m = 0; m < p->count; m++) NAME(tile_##t)(p, n, m, 1, 1);                                \
    }                                                                                                    \
                                                                                                         \
    static TARGET void NAME(expand_##t)(const void *task, int64_t first, int64_t last) {                 \
        const struct expansion *e = task;                                                                \
        for (int64_t n = first; n < last; n++) {                                                         \
            const uint8_t *w = e->weight + n * e->row_bytes;                                             \
            char *out = (char *)e->out + n * e->out_stride * (e->brain ? 2 : 4);                         \
            for (int64_t k = 0; k < e->inputs / VALUES; k++, w += BYTES_OF) {                            \
                NAME(head) h;                                                                            \
                NAME(head_##t)(w, &h);                                                                   \
                for (int64_t u = 0; u < VALUES / UNIT; u++)                                              \
                    _Pragma("GCC unroll 8") for (int i = 0; i < UNIT / 16; i++) {                        \
                        VECTOR v[16 / LANES];                                                            \
                        NAME(run_##t)(w, &h, u, i, v);                                                   \
                        int64_t at = k * VALUES + u * UNIT + i * 16;                                     \
                        for (int j = 0; j < 16 / LANES; j++, at += LANES)                                \
                            if (e->brain) NAME(store_brain)((uint16_t *)out + at, v[j]);                 \
                            else NAME(store)((float *)out + at, v[j]);                                   \
                    }                                                                                    \
            }                                                                                            \
        }                                                                                                \
    }

#include "list.h"

#undef FORMAT
#undef STEP

#define FORMAT(t, VALUES, BYTES_OF, UNIT) {NAME(multiply_##t), NAME(expand_##t)},
static const struct kernels NAME(table)[] = {
#include "list.h"
};
#undef FORMAT
