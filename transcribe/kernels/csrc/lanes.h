/* Products of a few rows of bfloat16 with the formats of 256 values that decoders are packed in: whole numbers times
 * whole numbers, sixteen rows of W at a time, each in a lane.
 *
 * To expand W's values costs more than to read them. Here its numbers stay bytes, and what they share, scale and minimum,
 * is left out of the inner product: it is multiplied with the sum over the 16 or 32 values that share it. x becomes whole
 * numbers too: `prepare` writes it as two digits in base 256, below the largest of each 32 values, so that a value is kept
 * exactly down to a hundredth of that. Sums of a run are exact; they are scaled and added up in float32 along the row. So W
 * is not rounded at all, the result is nearer to W's values than with W in bfloat16, and a row of x has the same bits
 * whatever rows are beside it.
 */

enum {
    RUN = 16,          /* values that share a scale in every format */
    LANES_BLOCK = 256, /* values of a block */
    LANES_ROWS = 16    /* of x at most: beyond, W expanded once for all of them is faster */
};

/* 32 values of a row of x: (256 high + low) * scale. */
struct digits {
    int8_t high[PAIRED], low[PAIRED];
    int32_t sums[PAIRED / RUN]; /* of 256 high + low over each run */
    float scale, total;         /* total: of the values */
};

/* A block of each of 16 rows of W, and what its values share by sub-blocks of 16 or 32: scale * code + least. */
struct lanes {
    float scale[LANES_BLOCK / RUN][TILE_ROWS], least[LANES_BLOCK / PAIRED][TILE_ROWS];
    uint32_t codes[LANES_BLOCK / 4][TILE_ROWS]; /* four to a lane, one a byte */
} ALIGNED;

static int64_t prepared_lanes(int64_t count, int64_t inputs) {
    return prepare_units(inputs) * count * (int64_t)sizeof(struct digits);
}

static BRAIN_TARGET void prepare_lanes(const void *task, int64_t first, int64_t last) {
    enum { BIAS = 127, BITS = 14, NO_NUMBER = 255 };
    const struct product *p = task;
    for (int64_t u = first; u < last; u++)
        for (int64_t m = 0; m < p->count; m++) {
            struct digits *d = (struct digits *)p->scratch + u * p->count + m;
            const uint8_t *x = (const uint8_t *)p->x + (m * p->x_stride + u * PAIRED) * 2;
            __m512 v[2];
            widen_brain_avx512(x, v), widen_brain_avx512(x + RUN * 2, v + 1);
            /* the largest is at least 2^14 and less than 2^15 when divided by `scale`, a power of two */
            __m512i largest = _mm512_max_epu32((__m512i)_mm512_abs_ps(v[0]), (__m512i)_mm512_abs_ps(v[1]));
            uint32_t found = _mm512_reduce_max_epu32(largest) >> 23, exponent = found > BITS ? found : BITS + 1;
            __m512 inverse = (__m512)_mm512_set1_epi32((int)((2 * BIAS + BITS - exponent) << 23));
            uint32_t power = found == NO_NUMBER ? 0x7FC00000 : (exponent - BITS) << 23;
            int32_t sum = 0;
            for (int r = 0; r < PAIRED / RUN; r++) {
                const __m512i most = _mm512_set1_epi32(127);
                __m512i q = _mm512_cvtps_epi32(v[r] * inverse);
                __m512i high = _mm512_min_epi32(_mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8), most);
                __m512i low = _mm512_min_epi32(_mm512_sub_epi32(q, _mm512_slli_epi32(high, 8)), most);
                _mm_storeu_si128((__m128i *)(d->high + r * RUN), _mm512_cvtepi32_epi8(high));
                _mm_storeu_si128((__m128i *)(d->low + r * RUN), _mm512_cvtepi32_epi8(low));
                sum += d->sums[r] = _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
            }
            memcpy(&d->scale, &power, 4);
            d->total = d->scale * (float)sum;
        }
}

/* Bits of a where the mask has them, elsewhere of b. */
#define PICK(mask, a, b) _mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), a, b, 0xCA)
#define MASK(mask, a) _mm512_and_si512(a, _mm512_set1_epi32(mask))

/* Sixteen bytes at `at` of each block, as four columns of 32 bits. */
BRAIN void quarter_columns(const uint8_t *const *b, const int at, __m512i *out) {
    __m512i z[4];
    UNROLL for (int i = 0; i < 4; i++) {
        z[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(b[i] + at)));
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128((const __m128i *)(b[4 + i] + at)), 1);
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128((const __m128i *)(b[8 + i] + at)), 2);
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128((const __m128i *)(b[12 + i] + at)), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b1 = _mm512_unpackhi_epi32(z[0], z[1]);
    __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b1, d), out[3] = _mm512_unpackhi_epi64(b1, d);
}

/* 64 bytes, as sixteen columns. */
BRAIN void columns(const uint8_t *const *b, const int at, __m512i *out) {
    for (int r = 0; r < TILE_ROWS; r++) out[r] = _mm512_loadu_si512(b[r] + at);
    transpose(out);
}

/* The four bytes of each lane times a factor. */
BRAIN void spread(__m512i v, const int is_signed, __m512 factor, float (*out)[TILE_ROWS]) {
    UNROLL for (int k = 0; k < 4; k++) {
        __m512i byte = _mm512_slli_epi32(v, 24 - 8 * k);
        byte = is_signed ? _mm512_srai_epi32(byte, 24) : _mm512_srli_epi32(byte, 24);
        _mm512_store_ps(out[k], _mm512_cvtepi32_ps(byte) * factor);
    }
}

/* As scales_and_minima in formats.h. */
BRAIN void lane_scales_and_minima(const uint8_t *const *b, struct lanes *s) {
    const int six = 0x3F3F3F3F, nibble = 0x0F0F0F0F;
    __m512i w[4];
    quarter_columns(b, 0, w);
    __m512 d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w[0]));
    __m512 m = -_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w[0], 16)));
    spread(MASK(six, w[1]), 0, d, s->scale);
    spread(MASK(six, PICK(nibble, w[3], _mm512_srli_epi32(w[1], 2))), 0, d, s->scale + 4);
    spread(MASK(six, w[2]), 0, m, s->least);
    spread(MASK(six, PICK(nibble, _mm512_srli_epi32(w[3], 4), _mm512_srli_epi32(w[2], 2))), 0, m, s->least + 4);
}

BRAIN void lanes_Q4_K(const uint8_t *const *b, struct lanes *s) {
    lane_scales_and_minima(b, s);
    UNROLL for (int half = 0; half < 2; half++) {
        __m512i v[TILE_ROWS];
        columns(b, 16 + 64 * half, v);
        _Pragma("GCC unroll 16") for (int t = 0; t < TILE_ROWS; t++) {
            uint32_t(*out)[TILE_ROWS] = s->codes + 32 * half + t / 8 * 16 + t % 8;
            _mm512_store_si512(out[0], MASK(0x0F0F0F0F, v[t]));
            _mm512_store_si512(out[8], MASK(0x0F0F0F0F, _mm512_srli_epi32(v[t], 4)));
        }
    }
}

/* Bit n of each byte, among others, as its bit 4. */
BRAIN __m512i as_fifth(__m512i v, const int n) { return n < 4 ? _mm512_slli_epi32(v, 4 - n) : _mm512_srli_epi32(v, n - 4); }

BRAIN void lanes_Q5_K(const uint8_t *const *b, struct lanes *s) {
    __m512i top[TILE_ROWS];
    lane_scales_and_minima(b, s);
    columns(b, 16, top);
    UNROLL for (int half = 0; half < 2; half++) {
        __m512i v[TILE_ROWS];
        columns(b, 48 + 64 * half, v);
        _Pragma("GCC unroll 16") for (int t = 0; t < TILE_ROWS; t++) {
            const int group = 4 * half + t / 8 * 2;
            uint32_t(*out)[TILE_ROWS] = s->codes + 8 * group + t % 8;
            __m512i low = PICK(0x0F0F0F0F, v[t], as_fifth(top[t % 8], group));
            __m512i high = PICK(0x0F0F0F0F, _mm512_srli_epi32(v[t], 4), as_fifth(top[t % 8], group + 1));
            _mm512_store_si512(out[0], MASK(0x1F1F1F1F, low));
            _mm512_store_si512(out[8], MASK(0x1F1F1F1F, high));
        }
    }
}

BRAIN void lanes_Q6_K(const uint8_t *const *b, struct lanes *s) {
    const int nibble = 0x0F0F0F0F, six = 0x3F3F3F3F;
    __m512i w[4], top[TILE_ROWS];
    float d[TILE_ROWS] ALIGNED;
    quarter_columns(b, 192, w);
    for (int r = 0; r < TILE_ROWS; r += 4) halves_avx512(b + r, 208, d + r, 4);
    UNROLL for (int i = 0; i < 4; i++) spread(w[i], 1, _mm512_load_ps(d), s->scale + 4 * i);
    columns(b, 128, top);
    UNROLL for (int half = 0; half < 2; half++) {
        __m512i v[TILE_ROWS];
        columns(b, 64 * half, v);
        UNROLL for (int t = 0; t < 8; t++) {
            uint32_t(*out)[TILE_ROWS] = s->codes + 32 * half + t;
            __m512i h = top[8 * half + t], first = v[t], second = v[t + 8];
            _mm512_store_si512(out[0], MASK(six, PICK(nibble, first, _mm512_slli_epi32(h, 4))));
            _mm512_store_si512(out[8], MASK(six, PICK(nibble, second, _mm512_slli_epi32(h, 2))));
            _mm512_store_si512(out[16], MASK(six, PICK(nibble, _mm512_srli_epi32(first, 4), h)));
            _mm512_store_si512(out[24], MASK(six, PICK(nibble, _mm512_srli_epi32(second, 4), _mm512_srli_epi32(h, 2))));
        }
    }
}

/* The sum over a run of 4 * words values, from values 4 * at of x on; w its codes. It fits 32 bits. */
BRAIN __m512i sum_of_run(const __m512i *w, const struct digits *d, const int at, const int words) {
    __m512i high = _mm512_setzero_si512(), low = high;
    int32_t four;
    UNROLL for (int i = 0; i < words; i++) {
        memcpy(&four, d->high + 4 * (at + i), 4);
        high = _mm512_dpbusd_epi32(high, w[i], _mm512_set1_epi32(four));
        memcpy(&four, d->low + 4 * (at + i), 4);
        low = _mm512_dpbusd_epi32(low, w[i], _mm512_set1_epi32(four));
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

typedef void (*lanes_function)(const uint8_t *const *b, struct lanes *s);

/* Codes less `zero`; scales of each `run`, and minima too if `minima`. Constant when this is compiled for a format. */
BRAIN void multiply_in_lanes(const struct product *p, int64_t first, int64_t last, const lanes_function expand,
                             const int size, const int run, const int zero, const int minima, const int64_t count) {
    struct lanes s;
    __m512 sum[LANES_ROWS];
    const int64_t blocks = p->inputs / LANES_BLOCK, strips = (last - first + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t number = 0; number < strips; number++) {
        const struct strip strip = strip_of(first, last, number, TILE_ROWS);
        const uint8_t *b[TILE_ROWS];
        const struct digits *d = p->scratch;
        for (int r = 0; r < TILE_ROWS; r++) /* of fewer, the last fills up */
            b[r] = p->weight + (strip.n + (r < strip.rows ? r : strip.rows - 1) * strip.spacing) * p->row_bytes;
        for (int64_t m = 0; m < count; m++) sum[m] = _mm512_setzero_ps();
        for (int64_t k = 0; k < blocks; k++) {
            for (int r = 0; r < TILE_ROWS; r++) AHEAD(b[r] + AHEAD_BYTES, size)
            expand(b, &s);
            for (int r = 0; r < TILE_ROWS; r++) b[r] += size;
            for (int u = 0; u < LANES_BLOCK / PAIRED; u++, d += count) {
                __m512i w[PAIRED / 4];
                UNROLL for (int i = 0; i < PAIRED / 4; i++) w[i] = _mm512_load_si512(s.codes[u * PAIRED / 4 + i]);
                for (int64_t m = 0; m < count; m++)
                    UNROLL for (int r = 0; r < PAIRED / run; r++) {
                        __m512i q = sum_of_run(w + r * run / 4, d + m, r * run / 4, run / 4);
                        if (zero) q = _mm512_sub_epi32(q, _mm512_set1_epi32(zero * d[m].sums[r]));
                        __m512 v = _mm512_cvtepi32_ps(q) * _mm512_set1_ps(d[m].scale);
                        sum[m] = _mm512_fmadd_ps(_mm512_load_ps(s.scale[u * (PAIRED / run) + r]), v, sum[m]);
                        if (minima) sum[m] = _mm512_fmadd_ps(_mm512_load_ps(s.least[u]), _mm512_set1_ps(d[m].total), sum[m]);
                    }
            }
        }
        for (int64_t m = 0; m < count; m++) {
            float v[TILE_ROWS] ALIGNED;
            _mm512_store_ps(v, sum[m]);
            for (int r = 0; r < strip.rows; r++) put_avx512(p, strip.n + r * strip.spacing, m, v[r]);
        }
    }
}

#define IN_LANES(t, size, run, zero, minima)                                                                    \
    static BRAIN_TARGET void multiply_##t##_lanes(const void *task, int64_t first, int64_t last) {              \
        const struct product *p = task;                                                                         \
        if (p->count == 1) multiply_in_lanes(p, first, last, lanes_##t, size, run, zero, minima, 1);            \
        else multiply_in_lanes(p, first, last, lanes_##t, size, run, zero, minima, p->count);                   \
    }
IN_LANES(Q4_K, 144, 32, 0, 1)
IN_LANES(Q5_K, 176, 32, 0, 1)
IN_LANES(Q6_K, 210, 16, 32, 0)

#define FORMAT(t, VALUES, SIZE, LENGTH) FORMAT_##t,
enum {
#include "list.h"
    FORMATS
};
#undef FORMAT

/* For the formats done here. */
static const rows_function table_lanes[FORMATS] = {
    [FORMAT_Q4_K] = multiply_Q4_K_lanes,
    [FORMAT_Q5_K] = multiply_Q5_K_lanes,
    [FORMAT_Q6_K] = multiply_Q6_K_lanes,
};
#undef PICK
#undef MASK
