/* Everything for the instruction set named by INSTRUCTION_SET. */
#include INSTRUCTION_SET

#ifdef PLAIN_NIBBLES
/* Sixteen nibbles from bit `shift` of each byte, less `zero`, scaled, and shifted if there is an offset. */
INLINE void NAME(nibbles)(const uint8_t *p, const int shift, float scale, VECTOR *w, const int zero, const float *offset) {
    BYTES q;
    memcpy(&q, p, 16);
    NAME(widen_signed)(((BYTES)((WORDS)q >> (uint16_t)shift) & 15) - (uint8_t)zero, w);
    for (int j = 0; j < 16 / LANES; j++) {
        w[j] = w[j] * NAME(all)(scale);
        if (offset) w[j] = w[j] + NAME(all)(*offset);
    }
}
#endif

#include "formats.h"
#include "rows.h"

#undef INSTRUCTION_SET
#undef PLAIN_NIBBLES
#undef TARGET
#undef NAME
#undef VECTOR
#undef LANES
#undef MAX_COUNT
#undef WIDE_ROWS
