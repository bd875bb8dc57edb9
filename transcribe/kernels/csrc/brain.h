/* Products of bfloat16 numbers: W's values are rounded to bfloat16 as they are expanded, and multiplied with bfloat16
 * activations into float32 sums. Two instructions do it: vdpbf16ps on vectors, tdpbf16ps on tiles. Stands on the formats
 * as avx512.h reads them.
 *
 * Both read prepared activations: whole stretches of 32 values, filled up with zeros.
 */

#define BRAIN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c,bmi2")))
#define BRAIN static inline __attribute__((always_inline)) BRAIN_TARGET

enum { PAIRED = 32 }; /* values in a vector of bfloat16 */

BRAIN __m512i round_brain(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* Values scale * (number - zero) + offset of the numbers 0 .. 15, or from `first` on. */
BRAIN __m512 values_of(const int first, const int zero, float scale, const float *offset) {
    const __m512 count = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 values = (count + _mm512_set1_ps((float)(first - zero))) * _mm512_set1_ps(scale);
    if (offset) values = values + _mm512_set1_ps(*offset);
    return values;
}

/* Numbers have few values: they are computed once a group and looked up in a table of 32, by words of which the low five
 * bits count. A table serves one group of 5-bit numbers, or two of 4-bit numbers, the second from 16 on. */
BRAIN __m512i look_up(__m512i table, __m512i words) { return _mm512_permutexvar_epi16(words, table); }

BRAIN __m512i table_of_one(const int zero, float scale, const float *offset) {
    return round_brain(values_of(0, zero, scale, offset), values_of(16, zero, scale, offset));
}

BRAIN __m512i table_of_two(const int zero, const float *scales, const float *offsets) {
    return round_brain(values_of(0, zero, scales[0], offsets), values_of(0, zero, scales[1], offsets ? offsets + 1 : 0));
}

/* The low nibbles of words, for the first or the second half of a table. */
BRAIN __m512i nibbles_of(__m512i words, const int half) {
    const __m512i mask = _mm512_set1_epi16(15);
    return half ? _mm512_ternarylogic_epi32(words, mask, _mm512_set1_epi16(16), 0xEA) : _mm512_and_si512(words, mask);
}

BRAIN __m512i words_of(const void *bytes) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)bytes)); }

/* Sixteen bytes twice, the second time shifted to their high nibbles. */
BRAIN __m512i words_twice(const uint8_t *p) {
    __m512i words = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)));
    return _mm512_srlv_epi16(words, _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1));
}

/* Values 32 i .. 32 i + 31 of unit u of block r, of which b is the address, h the heads and q the unit's integers. */
#define PAIR(t)                                                                                                     \
    BRAIN __m512i pair_##t(const uint8_t *b UNUSED, const int8_t *q UNUSED, const head_avx512 *h UNUSED,             \
                           const int r UNUSED, int64_t u UNUSED, const int i UNUSED)
#define UNIT_OF(t) BRAIN void integers_##t(const uint8_t *b UNUSED, int64_t u UNUSED, int8_t *q UNUSED)
#define FROM_RUNS(t)                                                                                                \
    UNIT_OF(t) { unit_##t##_avx512(b, u, q); }                                                                      \
    PAIR(t) {                                                                                                       \
        __m512 low, high;                                                                                           \
        run_##t##_avx512(b, q, h, r, u, 2 * i, &low);                                                               \
        run_##t##_avx512(b, q, h, r, u, 2 * i + 1, &high);                                                          \
        return round_brain(low, high);                                                                              \
    }

UNIT_OF(F32) {}
PAIR(F32) { return round_brain(_mm512_loadu_ps(b), _mm512_loadu_ps(b + 64)); }
UNIT_OF(F16) {}
PAIR(F16) {
    __m512 low, high;
    widen_half_avx512(b, &low), widen_half_avx512(b + 32, &high);
    return round_brain(low, high);
}
UNIT_OF(BF16) {}
PAIR(BF16) { return _mm512_loadu_si512(b); }
UNIT_OF(Q4_0) {}
PAIR(Q4_0) { return look_up(table_of_two(8, h->one_scale + (r & ~1), 0), nibbles_of(words_twice(b + 2), r & 1)); }
UNIT_OF(Q4_1) {}
PAIR(Q4_1) {
    __m512i table = table_of_two(0, h->one_scale + (r & ~1), h->one_offset + (r & ~1));
    return look_up(table, nibbles_of(words_twice(b + 4), r & 1));
}
UNIT_OF(Q5_0) {}
PAIR(Q5_0) {
    BYTES32 bits = twice_avx512(b + 6) | fifth_avx512(b + 2);
    return look_up(table_of_one(16, h->one_scale[r], 0), words_of(&bits));
}
UNIT_OF(Q5_1) {}
PAIR(Q5_1) {
    BYTES32 bits = twice_avx512(b + 8) | fifth_avx512(b + 4);
    return look_up(table_of_one(0, h->one_scale[r], &h->one_offset[r]), words_of(&bits));
}
FROM_RUNS(Q8_0)
FROM_RUNS(Q2_K)
FROM_RUNS(Q3_K)
UNIT_OF(Q4_K) {}
PAIR(Q4_K) {
    __m512i words = words_of(b + 16 + 32 * u);
    return look_up(table_of_two(0, h->scale[r] + 2 * u, h->offset[r] + 2 * u), nibbles_of(_mm512_srli_epi16(words, 4 * i), i));
}
UNIT_OF(Q5_K) { unit_Q5_K_avx512(b, u, q); }
PAIR(Q5_K) {
    return look_up(table_of_one(0, h->scale[r][2 * u + i], &h->offset[r][2 * u + i]), words_of(q + 32 * i));
}
FROM_RUNS(Q6_K)

#undef PAIR
#undef UNIT_OF
#undef FROM_RUNS

/* Single values count as blocks of 32 here. */
#define BLOCK(VALUES) (VALUES == 16 ? 32 : VALUES)
#define BYTES(VALUES, SIZE) (VALUES == 16 ? 2 * SIZE : SIZE)
#define UNIT(VALUES, LENGTH) (VALUES == 16 ? 32 : LENGTH)

/* `values` of a row from w on, as bfloat16. */
#define FORMAT(t, VALUES, SIZE, LENGTH)                                                                             \
    BRAIN void stretch_##t(const uint8_t *w, int64_t values, uint16_t *out) {                                       \
        enum { size = BYTES(VALUES, SIZE), block = BLOCK(VALUES), unit = UNIT(VALUES, LENGTH),                      \
               group = VALUES == 256 ? 1 : MAX_ROWS };                                                              \
        head_avx512 h;                                                                                              \
        int8_t q[unit] ALIGNED;                                                                                     \
        const uint8_t *b[group];                                                                                    \
        for (; values >= group * block; values -= group * block) {                                                  \
            UNROLL for (int g = 0; g < group; g++) b[g] = w + g * size;                                             \
            heads_##t##_avx512(b, &h, group);                                                                       \
            UNROLL for (int g = 0; g < group; g++)                                                                  \
                for (int64_t u = 0; u < block / unit; u++) {                                                        \
                    integers_##t(b[g], u, q);                                                                       \
                    UNROLL for (int i = 0; i < unit / PAIRED; i++, out += PAIRED)                                   \
                        _mm512_store_si512(out, pair_##t(b[g], q, &h, g, u, i));                                    \
                }                                                                                                   \
            w += group * size;                                                                                      \
        }                                                                                                           \
        if (group == 1) return;                                                                                     \
        for (; values >= block; values -= block, w += size, out += PAIRED) {                                        \
            heads_##t##_avx512(&w, &h, 1);                                                                          \
            _mm512_store_si512(out, pair_##t(w, q, &h, 0, 0, 0));                                                   \
        }                                                                                                           \
        if (VALUES == 16 && values > 0) {                                                                           \
            uint8_t padded[128] = {0};                                                                              \
            memcpy(padded, w, (size_t)(values * (SIZE / 16)));                                                      \
            _mm512_store_si512(out, pair_##t(padded, q, &h, 0, 0, 0));                                              \
        }                                                                                                           \
    }
#include "list.h"
#undef FORMAT
