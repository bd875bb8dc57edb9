/* What a decoder computes for a few rows beside its products: included once for each instruction set, after rows.h.
 *
 * Each function does units [first, last) of a step, a unit being a row unless said otherwise; operands lie in the step
 * as the structures here. Activations are float32, or bfloat16 where `brain`; sums are float32 in an order that depends
 * on the length of a row only, so a row has the same bits alone, in a batch, and on any number of threads.
 */

#define PARTS (16 / LANES)
#define EACH(j) UNROLL for (int j = 0; j < PARTS; j++)

typedef int32_t NAME(whole) __attribute__((vector_size(4 * LANES)));

/* Values at .. at + 15 of a row of `width`; zeros beyond it. */
INLINE void NAME(fetch)(const void *row, int64_t at, int64_t width, const int64_t brain, VECTOR *v) {
    const uint8_t *p = (const uint8_t *)row + at * (brain ? 2 : 4);
    if (at + 16 > width) {
        uint8_t padded[64] ALIGNED = {0};
        memcpy(padded, p, (size_t)(width - at) * (brain ? 2 : 4));
        if (brain) NAME(widen_brain)(padded, v);
        else EACH(j) v[j] = NAME(load)((const float *)padded + j * LANES);
    } else if (brain) NAME(widen_brain)(p, v);
    else EACH(j) v[j] = NAME(load)((const float *)p + j * LANES);
}

INLINE void NAME(leave)(void *row, int64_t at, int64_t width, const int64_t brain, const VECTOR *v) {
    uint8_t *p = (uint8_t *)row + at * (brain ? 2 : 4);
    if (at + 16 > width) {
        uint8_t padded[64] ALIGNED;
        if (brain) EACH(j) NAME(store_brain)((uint16_t *)padded + j * LANES, v[j]);
        else EACH(j) NAME(store)((float *)padded + j * LANES, v[j]);
        memcpy(p, padded, (size_t)(width - at) * (brain ? 2 : 4));
    } else if (brain) EACH(j) NAME(store_brain)((uint16_t *)p + j * LANES, v[j]);
    else EACH(j) NAME(store)((float *)p + j * LANES, v[j]);
}

INLINE const void *NAME(at)(const void *p, int64_t values, int64_t brain) {
    return (const uint8_t *)p + values * (brain ? 2 : 4);
}

INLINE float NAME(single)(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* e to the power of x, for x <= 0 or not large: 2^n times a polynomial over [-ln 2 / 2, ln 2 / 2] (Cephes' expf). */
INLINE VECTOR NAME(power)(VECTOR x) {
    const float magic = 0x1.8p23f; /* added, it leaves the nearest whole number in the low bits */
    NAME(whole) low = x < NAME(all)(-87.0f), none = x != x; /* all ones where the result is 0, or no number */
    x = (VECTOR)(((NAME(whole))x & ~low) | ((NAME(whole))NAME(all)(-87.0f) & low));
    VECTOR n = NAME(fused)(x, NAME(all)(0x1.715476p+0f), NAME(all)(magic));
    NAME(whole) exponent = ((NAME(whole))n - (NAME(whole))NAME(all)(magic)) << 23;
    n = n - NAME(all)(magic);
    x = NAME(fused)(n, NAME(all)(-0.693359375f), x);
    x = NAME(fused)(n, NAME(all)(2.12194440e-4f), x);
    VECTOR y = NAME(all)(1.9875691500e-4f);
    y = NAME(fused)(y, x, NAME(all)(1.3981999507e-3f));
    y = NAME(fused)(y, x, NAME(all)(8.3334519073e-3f));
    y = NAME(fused)(y, x, NAME(all)(4.1665795894e-2f));
    y = NAME(fused)(y, x, NAME(all)(1.6666665459e-1f));
    y = NAME(fused)(y, x, NAME(all)(5.0000001201e-1f));
    y = NAME(fused)(y, x * x, x + NAME(all)(1.0f));
    return (VECTOR)((((NAME(whole))y + exponent) & ~low) | none);
}
INLINE float NAME(power_of)(float x) {
    float lanes[LANES];
    NAME(store)(lanes, NAME(power)(NAME(all)(x)));
    return lanes[0];
}

#define PAIRWISE(name, expression)                                                                       \
    static TARGET void NAME(name)(const void *operands, int64_t first, int64_t last) {                   \
        const struct pairs *o = operands;                                                                \
        for (int64_t r = first; r < last; r++) {                                                         \
            const void *a = NAME(at)(o->a, r * o->a_stride, o->brain);                                   \
            const void *b = NAME(at)(o->b, r * o->b_stride, o->brain);                                   \
            void *out = (void *)NAME(at)(o->out, r * o->out_stride, o->brain);                           \
            for (int64_t i = 0; i < o->width; i += 16) {                                                 \
                VECTOR u[PARTS], v[PARTS];                                                               \
                NAME(fetch)(a, i, o->width, o->brain, u);                                                \
                NAME(fetch)(b, i, o->width, o->brain, v);                                                \
                EACH(j) u[j] = expression;                                                               \
                NAME(leave)(out, i, o->width, o->brain, u);                                           \
            }                                                                                            \
        }                                                                                                \
    }
PAIRWISE(add, u[j] + v[j])
PAIRWISE(times, u[j] * v[j])
#undef PAIRWISE

/* x / (1 + exp(-x)); `b` is not read. */
static TARGET void NAME(silu)(const void *operands, int64_t first, int64_t last) {
    const struct pairs *o = operands;
    for (int64_t r = first; r < last; r++) {
        const void *a = NAME(at)(o->a, r * o->a_stride, o->brain);
        void *out = (void *)NAME(at)(o->out, r * o->out_stride, o->brain);
        for (int64_t i = 0; i < o->width; i += 16) {
            VECTOR u[PARTS];
            NAME(fetch)(a, i, o->width, o->brain, u);
            EACH(j) {
                /* exp(-|x|) never overflows: 1 / (1 + e) for x >= 0, e / (1 + e) below */
                NAME(whole) negative = u[j] < NAME(all)(0.0f);
                VECTOR e = NAME(power)((VECTOR)((NAME(whole))u[j] | INT32_MIN));
                VECTOR above = (VECTOR)(((NAME(whole))e & negative) | ((NAME(whole))NAME(all)(1.0f) & ~negative));
                u[j] = u[j] * (above / (e + NAME(all)(1.0f)));
            }
            NAME(leave)(out, i, o->width, o->brain, u);
        }
    }
}

INLINE float NAME(row_total)(VECTOR *sum) {
    float total = 0;
    EACH(j) total += NAME(total)(sum[j]);
    return total;
}

/* (x - mean) / sqrt(variance + eps) * weight + bias, or without the mean where `centred` is 0. */
INLINE void NAME(normalise)(const struct norm *o, int64_t first, int64_t last, const int centred) {
    const int64_t width = o->width;
    for (int64_t r = first * o->parts; r < last * o->parts; r++) {
        const void *x = NAME(at)(o->x, r / o->parts * o->row_stride + r % o->parts * o->part_stride, o->brain);
        void *out = (void *)NAME(at)(o->out, r * width, o->brain);
        VECTOR sum[PARTS], v[PARTS];
        float mean = 0;
        if (centred) {
            EACH(j) sum[j] = NAME(all)(0);
            for (int64_t i = 0; i < width; i += 16) {
                NAME(fetch)(x, i, width, o->brain, v);
                EACH(j) sum[j] = sum[j] + v[j];
            }
            mean = NAME(row_total)(sum) / (float)width;
        }
        EACH(j) sum[j] = NAME(all)(0);
        for (int64_t i = 0; i < width; i += 16) {
            NAME(fetch)(x, i, width, o->brain, v);
            EACH(j) v[j] = v[j] - NAME(all)(mean);
            if (i + 16 > width) { /* what is beyond the row is not at the mean */
                float tail[16] = {0};
                EACH(j) NAME(store)(tail + j * LANES, v[j]);
                memset(tail + (width - i), 0, (size_t)(i + 16 - width) * 4);
                EACH(j) v[j] = NAME(load)(tail + j * LANES);
            }
            EACH(j) sum[j] = NAME(fused)(v[j], v[j], sum[j]);
        }
        float scale = 1.0f / __builtin_sqrtf(NAME(row_total)(sum) / (float)width + (float)o->eps);
        for (int64_t i = 0; i < width; i += 16) {
            VECTOR w[PARTS];
            NAME(fetch)(x, i, width, o->brain, v);
            NAME(fetch)(o->weight, i, width, o->brain, w);
            EACH(j) v[j] = (v[j] - NAME(all)(mean)) * NAME(all)(scale) * w[j];
            if (o->bias) {
                NAME(fetch)(o->bias, i, width, o->brain, w);
                EACH(j) v[j] = v[j] + w[j];
            }
            NAME(leave)(out, i, width, o->brain, v);
        }
    }
}
static TARGET void NAME(rms_norm)(const void *o, int64_t first, int64_t last) { NAME(normalise)(o, first, last, 0); }
static TARGET void NAME(layer_norm)(const void *o, int64_t first, int64_t last) { NAME(normalise)(o, first, last, 1); }

/* The halves of each head against each other: rotation [rows, 2, width / 2], cosines and sines. */
static TARGET void NAME(rotary_halves)(const void *operands, int64_t first, int64_t last) {
    const struct turn *o = operands;
    const int64_t half = o->width / 2;
    for (int64_t r = first; r < last; r++) {
        const void *cosines = NAME(at)(o->rotation, r * o->width, o->brain);
        const void *sines = NAME(at)(cosines, half, o->brain);
        for (int64_t h = 0; h < o->heads; h++) {
            const void *a = NAME(at)(o->x, r * o->row_stride + h * o->head_stride, o->brain);
            const void *b = NAME(at)(a, half, o->brain);
            void *out = (void *)NAME(at)(o->out, (r * o->heads + h) * o->width, o->brain);
            for (int64_t i = 0; i < half; i += 16) {
                VECTOR u[PARTS], v[PARTS], c[PARTS], s[PARTS], t[PARTS];
                NAME(fetch)(a, i, half, o->brain, u);
                NAME(fetch)(b, i, half, o->brain, v);
                NAME(fetch)(cosines, i, half, o->brain, c);
                NAME(fetch)(sines, i, half, o->brain, s);
                EACH(j) t[j] = u[j] * c[j] - v[j] * s[j];
                NAME(leave)(out, i, half, o->brain, t);
                EACH(j) t[j] = v[j] * c[j] + u[j] * s[j];
                NAME(leave)((void *)NAME(at)(out, half, o->brain), i, half, o->brain, t);
            }
        }
    }
}

/* Neighbours (2j, 2j + 1) as complex numbers times rotation, float32 [rows, turned / 2, 2]; the rest of a head passes. */
static TARGET void NAME(rotary_pairs)(const void *operands, int64_t first, int64_t last) {
    const struct turn *o = operands;
    for (int64_t r = first; r < last; r++) {
        const float *rotation = (const float *)o->rotation + r * o->turned;
        for (int64_t h = 0; h < o->heads; h++) {
            int64_t from = r * o->row_stride + h * o->head_stride, to = (r * o->heads + h) * o->width;
            for (int64_t i = 0; i < o->width; i += 2) {
                float x[2] = {0}, y[2];
                for (int64_t k = 0; k < 2 && i + k < o->width; k++)
                    x[k] = o->brain ? NAME(single)(((const uint16_t *)o->x)[from + i + k])
                                    : ((const float *)o->x)[from + i + k];
                if (i < o->turned) {
                    y[0] = x[0] * rotation[i] - x[1] * rotation[i + 1];
                    y[1] = x[0] * rotation[i + 1] + x[1] * rotation[i];
                } else memcpy(y, x, 8);
                for (int64_t k = 0; k < 2 && i + k < o->width; k++)
                    if (o->brain) ((uint16_t *)o->out)[to + i + k] = NAME(brain)(y[k]);
                    else ((float *)o->out)[to + i + k] = y[k];
            }
        }
    }
}

/* What attention keeps for the heads of a group: queries, weighted sums of values, the scores of a block of keys; the
 * largest score so far, and the sum of e to the power of each less that. */
struct NAME(heads) {
    float q[MOST_HEADS][WIDEST] ALIGNED, sum[MOST_HEADS][WIDEST] ALIGNED, score[MOST_HEADS][KEYS] ALIGNED;
    float most[MOST_HEADS], total[MOST_HEADS];
};

/* `count` keys against HEADS heads from head h, and then their values; rows are `stride` bytes apart. */
INLINE void NAME(block)(struct NAME(heads) *s, const uint8_t *keys, const uint8_t *values, int64_t count, int64_t stride,
                        int64_t width, int64_t h, const int64_t brain, const int HEADS) {
    for (int64_t t = 0; t < count; t++) {
        VECTOR product[4][PARTS], k[PARTS];
        if (!h) { /* the first heads fetch for all: memory is asked for early, since every row lies in another place */
            AHEAD(keys + (t + SOON) * stride, width * (brain ? 2 : 4))
            AHEAD(values + t * stride, width * (brain ? 2 : 4))
        }
        UNROLL for (int g = 0; g < HEADS; g++) EACH(j) product[g][j] = NAME(all)(0);
        for (int64_t i = 0; i < width; i += 16) {
            NAME(fetch)(keys + t * stride, i, width, brain, k);
            UNROLL for (int g = 0; g < HEADS; g++)
                EACH(j) product[g][j] = NAME(fused)(k[j], NAME(load)(s->q[h + g] + i + j * LANES), product[g][j]);
        }
        UNROLL for (int g = 0; g < HEADS; g++) s->score[h + g][t] = NAME(row_total)(product[g]);
    }
    float shrink[4];
    for (int g = 0; g < HEADS; g++) {
        float *score = s->score[h + g], top = s->most[h + g];
        for (int64_t t = 0; t < count; t++) top = score[t] > top ? score[t] : top;
        for (int64_t t = count; t < KEYS; t++) score[t] = -__builtin_inff();
        shrink[g] = s->most[h + g] == top ? 1.0f : NAME(power_of)(s->most[h + g] - top);
        VECTOR gathered[PARTS];
        EACH(j) gathered[j] = NAME(all)(0);
        for (int64_t t = 0; t < KEYS; t += 16)
            EACH(j) {
                VECTOR p = NAME(power)(NAME(load)(score + t + j * LANES) - NAME(all)(top));
                NAME(store)(score + t + j * LANES, p);
                gathered[j] = gathered[j] + p;
            }
        s->total[h + g] = s->total[h + g] * shrink[g] + NAME(row_total)(gathered);
        s->most[h + g] = top;
    }
    for (int64_t i = 0; i < width; i += 16) {
        VECTOR sum[4][PARTS], v[PARTS];
        UNROLL for (int g = 0; g < HEADS; g++)
            EACH(j) sum[g][j] = NAME(load)(s->sum[h + g] + i + j * LANES) * NAME(all)(shrink[g]);
        for (int64_t t = 0; t < count; t++) {
            NAME(fetch)(values + t * stride, i, width, brain, v);
            UNROLL for (int g = 0; g < HEADS; g++)
                EACH(j) sum[g][j] = NAME(fused)(v[j], NAME(all)(s->score[h + g][t]), sum[g][j]);
        }
        UNROLL for (int g = 0; g < HEADS; g++) EACH(j) NAME(store)(s->sum[h + g] + i + j * LANES, sum[g][j]);
    }
}

/* One group of heads of one sequence. */
INLINE void NAME(attend_one)(const struct attend *o, int64_t sequence, int64_t group, const int64_t brain) {
    const int64_t *place = o->table + 5 * sequence, width = o->width, bytes = brain ? 2 : 4, length = place[2];
    const int64_t heads = o->heads / o->groups, stride = place[3] * bytes, own = (length - 1) * stride;
    uint8_t *keys = (uint8_t *)place[0] + group * place[4] * bytes;
    uint8_t *values = (uint8_t *)place[1] + group * place[4] * bytes;
    if (o->fresh) {
        memcpy(keys + own, NAME(at)(o->k, sequence * o->k_stride + group * width, brain), (size_t)(width * bytes));
        memcpy(values + own, NAME(at)(o->v, sequence * o->v_stride + group * width, brain), (size_t)(width * bytes));
    }
    struct NAME(heads) s;
    for (int64_t h = 0; h < heads; h++) {
        const void *row = NAME(at)(o->q, sequence * o->q_stride + (group * heads + h) * width, brain);
        for (int64_t i = 0; i < width; i += 16) {
            VECTOR v[PARTS];
            NAME(fetch)(row, i, width, brain, v);
            EACH(j) NAME(store)(s.q[h] + i + j * LANES, v[j] * NAME(all)((float)o->scale));
            EACH(j) NAME(store)(s.sum[h] + i + j * LANES, NAME(all)(0));
        }
        s.most[h] = -__builtin_inff(), s.total[h] = 0;
    }
    for (int64_t t = 0; t < length; t += KEYS, keys += KEYS * stride, values += KEYS * stride) {
        const int64_t count = length - t < KEYS ? length - t : KEYS;
        int64_t h = 0;
        for (; h + 4 <= heads; h += 4) NAME(block)(&s, keys, values, count, stride, width, h, brain, 4);
        for (; h + 2 <= heads; h += 2) NAME(block)(&s, keys, values, count, stride, width, h, brain, 2);
        if (h < heads) NAME(block)(&s, keys, values, count, stride, width, h, brain, 1);
    }
    for (int64_t h = 0; h < heads; h++) {
        void *row = (void *)NAME(at)(o->out, (sequence * o->heads + group * heads + h) * width, brain);
        for (int64_t i = 0; i < width; i += 16) {
            VECTOR v[PARTS];
            EACH(j) v[j] = NAME(load)(s.sum[h] + i + j * LANES) / NAME(all)(s.total[h]);
            NAME(leave)(row, i, width, brain, v);
        }
    }
}

static TARGET void NAME(attend)(const void *operands, int64_t first, int64_t last) {
    const struct attend *o = operands;
    for (int64_t unit = first; unit < last; unit++)
        if (o->brain) NAME(attend_one)(o, unit / o->groups, unit % o->groups, 1);
        else NAME(attend_one)(o, unit / o->groups, unit % o->groups, 0);
}

static const rows_function NAME(operations)[] = {
    NAME(add),  NAME(times),         NAME(silu),         NAME(rms_norm), NAME(layer_norm),
    NAME(rotary_halves), NAME(rotary_pairs), NAME(attend),
};

#undef PARTS
#undef EACH
