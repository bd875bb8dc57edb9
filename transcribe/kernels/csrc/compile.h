/* Everything for the instruction set named by INSTRUCTION_SET. */
#include INSTRUCTION_SET

/* To the nearest bfloat16, ties to even; any NaN becomes torch's. */
INLINE uint16_t NAME(brain)(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Compiled here too: plain SSE code among AVX code would wait for the whole of every register it touches. */
INLINE void NAME(put)(const struct product *p, int64_t n, int64_t m, float value) {
    if (p->bias) value += p->bias[n];
    if (p->brain) ((uint16_t *)p->y)[m * p->y_stride + n] = NAME(brain)(value);
    else ((float *)p->y)[m * p->y_stride + n] = value;
}

/* The float16 at byte `at` of each row's block. */
INLINE void NAME(halves)(const uint8_t *const *b, const int at, float *out, const int rows) {
#ifdef FOUR_HALVES
    uint64_t four = 0;
    for (int r = 0; r < rows; r++) {
        uint16_t bits;
        memcpy(&bits, b[r] + at, 2);
        four |= (uint64_t)bits << 16 * r;
    }
    _mm_storeu_ps(out, _mm_cvtph_ps(_mm_cvtsi64_si128((long long)four)));
    IN_MEMORY(out, 16);
#else
    for (int r = 0; r < rows; r++) {
        uint16_t bits;
        memcpy(&bits, b[r] + at, 2);
        out[r] = NAME(half)(bits);
    }
#endif
}

#ifndef OWN_NIBBLES
/* Sixteen nibbles from bit `shift` of each byte, less `zero`, scaled, and shifted if there is an offset. */
INLINE void NAME(nibbles)(const uint8_t *p, const int shift, float scale, VECTOR *w, const int zero, const float *offset) {
    BYTES16 q;
    memcpy(&q, p, 16);
    q = ((BYTES16)((WORDS16)q >> (uint16_t)shift) & 15) - (uint8_t)zero;
    NAME(widen)((const int8_t *)&q, w);
    for (int j = 0; j < 16 / LANES; j++) {
        w[j] = w[j] * NAME(all)(scale);
        if (offset) w[j] = w[j] + NAME(all)(*offset);
    }
}
#endif

#include "formats.h"
#include "rows.h"
#include "operations.h"
#include "separable.h"

#undef INSTRUCTION_SET
#undef OWN_NIBBLES
#undef FOUR_HALVES
#undef TARGET
#undef NAME
#undef VECTOR
#undef LANES
#undef REGISTERS
#undef WIDE_TILES
