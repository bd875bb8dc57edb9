/* A separable convolution over time: each channel convolved by itself, then a product across channels. float32.
 *
 * A tile is some rows of the result: convolved into a place of the thread's own, then projected from there. The result may
 * lie where x did: a tile is written when every tile that reads these rows of x has been convolved, which is when the
 * next one has. So a thread convolves a tile, then projects the one it had before. Each value is one chain of fused
 * products, whatever the tiles and the threads.
 *
 * In its place a tile is [blocks of 16 channels][rows][16].
 */
#define PARTS (16 / LANES)
#define EACH(j) UNROLL for (int j = 0; j < PARTS; j++)
#if LANES == 16
#define ROWS 12
#else
#define ROWS 6
#endif
#define ALL_ROWS(i) _Pragma("GCC unroll 12") for (int i = 0; i < ROWS; i++)

/* 16 channels from `c` of the rows of x that the tile depends on: [rows][16], zeros where there are none. */
INLINE void NAME(gather)(const struct separable *s, int64_t first, int64_t count, int64_t c, float *window) {
    const int64_t channels = s->inputs - c < 16 ? s->inputs - c : 16;
    for (int64_t r = 0; r < count; r++, window += 16) {
        const int inside = first + r >= 0 && first + r < s->rows;
        const float *x = s->x + (first + r) * s->inputs + c;
        if (inside && channels == 16) EACH(j) NAME(store)(window + j * LANES, NAME(load)(x + j * LANES));
        else {
            memset(window, 0, 64);
            if (inside) memcpy(window, x, (size_t)channels * 4);
        }
    }
}

/* `count` rows of each channel's own convolution from row `from` on: the tile. */
INLINE void NAME(convolve)(const struct separable *s, int64_t from, int64_t count, float *window, float *tile) {
    const int64_t reach = s->dilation * (s->kernel - 1), padded = (s->inputs + 15) / 16 * 16;
    for (int64_t c = 0; c < s->inputs; c += 16, tile += 16 * s->tile) {
        NAME(gather)(s, from * s->stride - reach / 2, (count - 1) * s->stride + reach + 1, c, window);
        for (int j = 0; j < PARTS; j++)
            for (int64_t t = 0; t < count; t += ROWS) {
                const float *w = s->depthwise + c + j * LANES, *x = window + t * s->stride * 16 + j * LANES;
                VECTOR sum[ROWS];
                ALL_ROWS(i) sum[i] = NAME(all)(0);
                for (int64_t k = 0; k < s->kernel; k++, w += padded, x += s->dilation * 16) {
                    VECTOR v = NAME(load)(w);
                    ALL_ROWS(i) sum[i] = NAME(fused)(v, NAME(load)(x + i * s->stride * 16), sum[i]);
                }
                ALL_ROWS(i) NAME(store)(tile + (t + i) * 16 + j * LANES, sum[i]);
            }
    }
}

/* Without a convolution: every `stride`-th row of x as it is. */
INLINE void NAME(take)(const struct separable *s, int64_t from, int64_t count, float *tile) {
    for (int64_t c = 0; c < s->inputs; c += 16, tile += 16 * s->tile)
        for (int64_t t = 0; t < count; t++) {
            int64_t row = (from + t) * s->stride < s->rows ? (from + t) * s->stride : s->rows - 1;
            NAME(gather)(s, row, 1, c, tile + t * 16);
        }
}

/* ROWS rows of the tile times two vectors of outputs, of which `count` rows and `outputs` exist. */
INLINE void NAME(cell)(const struct separable *s, const float *tile, int64_t n, float *out, int64_t count, int64_t outputs) {
    VECTOR sum[ROWS][2];
    const float *w = s->weight + n;
    ALL_ROWS(i) {
        sum[i][0] = NAME(load)(s->bias + n);
        sum[i][1] = NAME(load)(s->bias + n + LANES);
    }
    for (int64_t c = 0; c < s->inputs; c += 16, tile += 16 * s->tile) {
        const int64_t channels = s->inputs - c < 16 ? s->inputs - c : 16;
        for (const float *a = tile; a < tile + channels; a++, w += s->pitch) {
            VECTOR v = NAME(load)(w), u = NAME(load)(w + LANES);
            ALL_ROWS(i) {
                VECTOR x = NAME(all)(a[i * 16]);
                sum[i][0] = NAME(fused)(x, v, sum[i][0]);
                sum[i][1] = NAME(fused)(x, u, sum[i][1]);
            }
        }
    }
    ALL_ROWS(i) {
        if (s->rectified) /* what is not a number stays so */
            for (int j = 0; j < 2; j++) sum[i][j] = (VECTOR)((NAME(whole))sum[i][j] & ~(sum[i][j] < NAME(all)(0)));
        if (i < count && outputs >= 2 * LANES) {
            NAME(store)(out + i * s->outputs, sum[i][0]);
            NAME(store)(out + i * s->outputs + LANES, sum[i][1]);
        } else if (i < count) {
            float both[2 * LANES];
            NAME(store)(both, sum[i][0]);
            NAME(store)(both + LANES, sum[i][1]);
            memcpy(out + i * s->outputs, both, (size_t)outputs * 4);
        }
    }
}

INLINE void NAME(project)(const struct separable *s, int64_t from, int64_t count, const float *tile) {
    for (int64_t n = 0; n < s->outputs; n += 2 * LANES)
        for (int64_t t = 0; t < count; t += ROWS)
            NAME(cell)(s, tile + t * 16, n, s->out + (from + t) * s->outputs + n, count - t, s->outputs - n);
}

/* A thread's part in it: all threads of a team call this. Units are convolved in order, so when one has been, those before
 * it have. */
static TARGET void NAME(separable)(void *operands, int64_t *next, int64_t *done) {
    struct separable *s = operands;
    const int64_t steps = (s->rows - 1) / s->stride + 1, units = (steps + s->tile - 1) / s->tile;
    const int64_t place = (s->inputs + 15) / 16 * 16 * s->tile;
    int64_t thread = __atomic_fetch_add(&s->entered, 1, __ATOMIC_RELAXED), held = -1;
    if (thread >= s->threads) return;
    float *tile = s->scratch + thread * s->share, *other = tile + place, *window = other + place;
    for (;;) {
        int64_t unit = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), from = unit * s->tile;
        if (unit < units) {
            int64_t count = steps - from < s->tile ? (steps - from + 11) / 12 * 12 : s->tile;
            if (s->depthwise) NAME(convolve)(s, from, count, window, tile);
            else NAME(take)(s, from, count, tile);
            wait_for(&s->convolved, unit);
            __atomic_store_n(&s->convolved, unit + 1, __ATOMIC_RELEASE);
        }
        if (held >= 0) {
            wait_for(&s->convolved, held + 2 < units ? held + 2 : units);
            from = held * s->tile;
            NAME(project)(s, from, steps - from < s->tile ? steps - from : s->tile, other);
            __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
        }
        if (unit >= units) return;
        float *swap = tile;
        tile = other, other = swap, held = unit;
    }
}

#undef PARTS
#undef EACH
#undef ROWS
#undef ALL_ROWS
