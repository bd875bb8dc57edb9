/* Products of bfloat16 numbers on vectors, for processors that have vdpbf16ps but no tiles. As in rows.h: each result is
 * one chain of fused products, so its bits do not depend on the number of rows.
 */

static int64_t prepared_dot(int64_t count, int64_t inputs) { return count * prepare_units(inputs) * PAIRED * 2; }

/* Rows of x without gaps, filled up with zeros. */
static void prepare_dot(const void *task, int64_t first, int64_t last) {
    const struct product *p = task;
    int64_t stride = prepare_units(p->inputs) * PAIRED, end = last * PAIRED < p->inputs ? last * PAIRED : p->inputs;
    for (int64_t m = 0; m < p->count; m++) {
        uint16_t *out = (uint16_t *)p->scratch + m * stride;
        memcpy(out + first * PAIRED, (const uint16_t *)p->x + m * p->x_stride + first * PAIRED,
               (size_t)(end - first * PAIRED) * 2);
        memset(out + end, 0, (size_t)(last * PAIRED - end) * 2);
    }
}

#define DOT_START(c) x[c] = (const uint16_t *)p->scratch + (m + c) * stride;
#define DOT_ROW(t, r) w[r] = p->weight + (n + r) * p->row_bytes;
#define DOT_UNIT(t, r) integers_##t(w[r], u, q[r]);
#define DOT_PAIR(t, r) v[r] = pair_##t(w[r], q[r], &h, r, u, i);
#define DOT_END(t, r) w[r] = memcpy(padded[r], w[r], (size_t)rest * (size / PAIRED));
#define DOT_ZERO(r, c) sum[r][c] = _mm512_setzero_ps();
#define DOT_FUSE(r, c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)v[r], (__m512bh)_mm512_loadu_si512(x[c] + at));
#define DOT_PUT(r, c) put_avx512(p, n + r, m + c, _mm512_reduce_add_ps(sum[r][c]));

#define DOT_STEP(t, ROWS, COUNT, offset)                                                                            \
    do {                                                                                                            \
        __m512i v[ROWS];                                                                                            \
        const int64_t at = offset;                                                                                  \
        ROWS_##ROWS(DOT_PAIR, t) CELLS_##ROWS##_##COUNT(DOT_FUSE)                                                   \
    } while (0)

#define DOT(t, VALUES, SIZE, LENGTH, ROWS, COUNT)                                                                   \
    BRAIN void dot_##t##_##ROWS##_##COUNT(const struct product *p, int64_t n, int64_t m) {                          \
        enum { size = BYTES(VALUES, SIZE), block = BLOCK(VALUES), unit = UNIT(VALUES, LENGTH) };                    \
        const int64_t blocks = p->inputs / block, rest = p->inputs % block, ahead = 4 * p->row_bytes;               \
        const int64_t stride = prepare_units(p->inputs) * PAIRED;                                                   \
        head_avx512 h;                                                                                              \
        __m512 sum[ROWS][COUNT];                                                                                    \
        int8_t q[ROWS][unit] ALIGNED;                                                                               \
        const uint8_t *w[ROWS];                                                                                     \
        const uint16_t *x[COUNT];                                                                                   \
        ROWS_##ROWS(DOT_ROW, t) COUNT_##COUNT(DOT_START) CELLS_##ROWS##_##COUNT(DOT_ZERO)                           \
        for (int64_t k = 0; k < blocks; k++) {                                                                      \
            ROWS_##ROWS(ROW_AHEAD, t)                                                                               \
            heads_##t##_avx512(w, &h, ROWS);                                                                        \
            for (int64_t u = 0; u < block / unit; u++) {                                                            \
                ROWS_##ROWS(DOT_UNIT, t)                                                                            \
                UNROLL for (int i = 0; i < unit / PAIRED; i++)                                                      \
                    DOT_STEP(t, ROWS, COUNT, k * block + u * unit + i * PAIRED);                                    \
            }                                                                                                       \
            ROWS_##ROWS(ROW_NEXT, t)                                                                                \
        }                                                                                                           \
        if (VALUES == 16 && rest) {                                                                                 \
            uint8_t padded[ROWS][128] = {{0}};                                                                      \
            const int64_t u = 0;                                                                                    \
            const int i = 0;                                                                                        \
            ROWS_##ROWS(DOT_END, t)                                                                                 \
            DOT_STEP(t, ROWS, COUNT, blocks * block);                                                               \
        }                                                                                                           \
        CELLS_##ROWS##_##COUNT(DOT_PUT)                                                                             \
    }

#define FORMAT(t, VALUES, SIZE, LENGTH)                                                                             \
    DOT(t, VALUES, SIZE, LENGTH, 1, 1)                                                                              \
    DOT(t, VALUES, SIZE, LENGTH, 4, 1)                                                                              \
    DOT(t, VALUES, SIZE, LENGTH, 4, 2)                                                                              \
    DOT(t, VALUES, SIZE, LENGTH, 4, 4)                                                                              \
    DOT(t, VALUES, SIZE, LENGTH, 2, 8)                                                                              \
                                                                                                                    \
    static BRAIN_TARGET void multiply_##t##_dot(const void *task, int64_t first, int64_t last) {                    \
        const struct product *p = task;                                                                             \
        int64_t n = first, m;                                                                                       \
        for (; n + 4 <= last; n += 4) {                                                                             \
            for (m = 0; m + 8 <= p->count; m += 8) dot_##t##_2_8(p, n, m), dot_##t##_2_8(p, n + 2, m);              \
            for (; m + 4 <= p->count; m += 4) dot_##t##_4_4(p, n, m);                                               \
            for (; m + 2 <= p->count; m += 2) dot_##t##_4_2(p, n, m);                                               \
            if (m < p->count) dot_##t##_4_1(p, n, m);                                                               \
        }                                                                                                           \
        for (; n < last; n++)                                                                                       \
            for (m = 0; m < p->count; m++) dot_##t##_1_1(p, n, m);                                                  \
    }
#include "list.h"
#undef FORMAT

#define FORMAT(t, VALUES, SIZE, LENGTH) {multiply_##t##_dot, expand_##t##_avx512},
static const struct kernels table_dot[] = {
#include "list.h"
};
#undef FORMAT
