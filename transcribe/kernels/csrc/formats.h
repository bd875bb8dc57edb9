/* How each format stores its values: included once for each instruction set, after its vector layer.
 *
 * A row is a whole number of blocks. A block is taken apart in units, the stretch over which its layout repeats, and a
 * unit in runs of 16 values, which share a scale in every format:
 *
 *     HEADS(t)  heads_t(b, h, rows)           what a block's values share, for the blocks of several rows at once
 *     UNIT(t)   unit_t(b, u, q)               the integers of unit u as bytes, for formats that scatter their bits
 *     RUN(t)    run_t(b, q, h, r, u, i, w)    values 16 i .. 16 i + 15 of unit u of row r, as 16 / LANES vectors
 *
 * Values are scale * q + offset, rounded after the product and after the sum, as dequantize.py defines them. The layouts
 * are those of ggml-common.h.
 */

typedef struct {
    float one_scale[MAX_ROWS], one_offset[MAX_ROWS]; /* formats whose block is one group */
    float scale[MAX_ROWS][16], offset[MAX_ROWS][16]; /* the others: by row and group */
} NAME(head);

#define HEADS(t) \
    INLINE void NAME(heads_##t)(const uint8_t *const *b UNUSED, NAME(head) *h UNUSED, const int rows UNUSED)
#define UNIT(t) INLINE void NAME(unit_##t)(const uint8_t *b UNUSED, int64_t u UNUSED, int8_t *q UNUSED)
#define RUN(t)                                                                                               \
    INLINE void NAME(run_##t)(const uint8_t *b UNUSED, const int8_t *q UNUSED, const NAME(head) *h UNUSED,   \
                              const int r UNUSED, int64_t u UNUSED, const int i UNUSED, VECTOR *w)

#define LOAD(v, p) memcpy(&(v), (p), sizeof(v))

/* What is in `mask` after a shift of each byte by n bits to the right, or by -n to the left. */
INLINE BYTES32 NAME(field)(BYTES32 q, const int n, uint8_t mask) {
    return (BYTES32)(n < 0 ? (WORDS32)q << (uint16_t)-n : (WORDS32)q >> (uint16_t)n) & mask;
}

INLINE void NAME(keep)(BYTES32 v, int8_t *q) {
    memcpy(q, &v, 32);
    IN_MEMORY(q, 32);
}

/* The values of a run from its integers. */
INLINE void NAME(scaled)(const int8_t *q, float scale, VECTOR *w) {
    NAME(widen)(q, w);
    for (int j = 0; j < 16 / LANES; j++) w[j] = w[j] * NAME(all)(scale);
}

INLINE void NAME(scaled_shifted)(const int8_t *q, float scale, float offset, VECTOR *w) {
    NAME(scaled)(q, scale, w);
    for (int j = 0; j < 16 / LANES; j++) w[j] = w[j] + NAME(all)(offset);
}

/* Sixteen scales from their integers. */
INLINE void NAME(scales)(const int8_t *q, float scale, float *out) {
    VECTOR w[16 / LANES];
    NAME(scaled)(q, scale, w);
    for (int j = 0; j < 16 / LANES; j++) NAME(store)(out + j * LANES, w[j]);
    IN_MEMORY(out, 64);
}

INLINE float NAME(half_at)(const uint8_t *p) {
    uint16_t bits;
    LOAD(bits, p);
    return NAME(half)(bits);
}

/* Eight 6-bit scales and eight 6-bit minima in 12 bytes. Bytes 0-3 and 4-7 hold the first four of each in their low six
 * bits; their top two bits complete the last four, whose low and high nibbles are bytes 8-11. */
INLINE void NAME(scales_and_minima)(const uint8_t *const *b, NAME(head) *h, const int rows) {
    for (int r = 0; r < rows; r++) {
        uint64_t first, second, rest; /* 32 bits each */
        uint32_t word[3];
        LOAD(word, b[r] + 4);
        first = word[0], second = word[1], rest = word[2];
        float d = NAME(half_at)(b[r]), m = NAME(half_at)(b[r] + 2);
        rest = (rest & 0x0F0F0F0F) << 32 | (rest >> 4 & 0x0F0F0F0F); /* for the scales above, for the minima below */
        first = (first & 0x3F3F3F3F) | (first & 0xC0C0C0C0) << 30;
        second = (second & 0x3F3F3F3F) | (second & 0xC0C0C0C0) << 30;
        NAME(eight)(first | (rest & 0x0F0F0F0F00000000), d, h->scale[r]);
        NAME(eight)(second | rest << 32, -m, h->offset[r]);
    }
}

HEADS(Q4_0) { NAME(halves)(b, 0, h->one_scale, rows); }
UNIT(Q4_0) {}
RUN(Q4_0) { NAME(nibbles)(b + 2, 4 * i, h->one_scale[r], w, 8, 0); }

HEADS(Q4_1) { NAME(halves)(b, 0, h->one_scale, rows), NAME(halves)(b, 2, h->one_offset, rows); }
UNIT(Q4_1) {}
RUN(Q4_1) { NAME(nibbles)(b + 4, 4 * i, h->one_scale[r], w, 0, &h->one_offset[r]); }

HEADS(Q5_0) { NAME(halves)(b, 0, h->one_scale, rows); }
UNIT(Q5_0) {
    NAME(keep)((NAME(twice)(b + 6) | NAME(fifth)(b + 2)) - 16, q);
}
RUN(Q5_0) { NAME(scaled)(q + 16 * i, h->one_scale[r], w); }

HEADS(Q5_1) { NAME(halves)(b, 0, h->one_scale, rows), NAME(halves)(b, 2, h->one_offset, rows); }
UNIT(Q5_1) {
    NAME(keep)(NAME(twice)(b + 8) | NAME(fifth)(b + 4), q);
}
RUN(Q5_1) { NAME(scaled_shifted)(q + 16 * i, h->one_scale[r], h->one_offset[r], w); }

HEADS(Q8_0) { NAME(halves)(b, 0, h->one_scale, rows); }
UNIT(Q8_0) {}
RUN(Q8_0) { NAME(scaled)((const int8_t *)b + 2 + 16 * i, h->one_scale[r], w); }

/* 64 bytes of 2-bit fields: a unit is 32 bytes of them, four planes of 32 values. */
HEADS(Q2_K) {
    for (int r = 0; r < rows; r++) {
        BYTES16 both, low, high;
        LOAD(both, b[r]);
        low = both & 15, high = both >> 4;
        NAME(scales)((const int8_t *)&low, NAME(half_at)(b[r] + 80), h->scale[r]);
        NAME(scales)((const int8_t *)&high, -NAME(half_at)(b[r] + 82), h->offset[r]);
    }
}
UNIT(Q2_K) {
    BYTES32 packed;
    LOAD(packed, b + 16 + 32 * u);
    UNROLL for (int plane = 0; plane < 4; plane++) NAME(keep)(NAME(field)(packed, 2 * plane, 3), q + 32 * plane);
}
RUN(Q2_K) { NAME(scaled_shifted)(q + 16 * i, h->scale[r][8 * u + i], h->offset[r][8 * u + i], w); }

/* As Q2_K, with a third bit in eight planes of 32, and sixteen 6-bit scales: their low four bits are the nibbles of bytes
 * 96-103, their top two the fields of bytes 104-107. */
HEADS(Q3_K) {
    for (int r = 0; r < rows; r++) {
        const uint64_t nibble = 0x0F0F0F0F0F0F0F0F, field = 0x03030303;
        uint64_t low, bits[2];
        uint32_t high;
        LOAD(low, b[r] + 96);
        LOAD(high, b[r] + 104);
        bits[0] = (low & nibble) | (high & field) << 4 | (high >> 2 & field) << 36;
        bits[1] = (low >> 4 & nibble) | (high >> 4 & field) << 4 | (high >> 6 & field) << 36;
        BYTES16 q;
        LOAD(q, bits);
        q -= 32;
        NAME(scales)((const int8_t *)&q, NAME(half_at)(b[r] + 108), h->scale[r]);
    }
}
UNIT(Q3_K) {
    BYTES32 packed, top;
    LOAD(packed, b + 32 + 32 * u);
    LOAD(top, b);
    if (u) top = NAME(field)(top, 4, 15);
    UNROLL for (int plane = 0; plane < 4; plane++)
        NAME(keep)((NAME(field)(packed, 2 * plane, 3) | NAME(field)(top, plane - 2, 4)) - 4, q + 32 * plane);
}
RUN(Q3_K) { NAME(scaled)(q + 16 * i, h->scale[r][8 * u + i], w); }

/* A unit is 32 bytes: their low nibbles, then their high ones. */
HEADS(Q4_K) { NAME(scales_and_minima)(b, h, rows); }
UNIT(Q4_K) {}
RUN(Q4_K) {
    int64_t group = 2 * u + i / 2;
    NAME(nibbles)(b + 16 + 32 * u + 16 * (i & 1), 4 * (i / 2), h->scale[r][group], w, 0, &h->offset[r][group]);
}

/* As Q4_K, with a fifth bit in eight planes of 32. */
HEADS(Q5_K) { NAME(scales_and_minima)(b, h, rows); }
UNIT(Q5_K) {
    BYTES32 packed, top;
    LOAD(packed, b + 48 + 32 * u);
    LOAD(top, b + 16);
    top = (BYTES32)((WORDS32)top >> (uint16_t)(2 * u));
    NAME(keep)(NAME(field)(packed, 0, 15) | NAME(field)(top, -4, 16), q);
    NAME(keep)(NAME(field)(packed, 4, 15) | NAME(field)(top, -3, 16), q + 32);
}
RUN(Q5_K) {
    int64_t group = 2 * u + i / 2;
    NAME(scaled_shifted)(q + 16 * i, h->scale[r][group], h->offset[r][group], w);
}

/* A unit is 64 bytes, their low nibbles and then their high ones, and 32 bytes with the top two bits in four planes. */
HEADS(Q6_K) {
    for (int r = 0; r < rows; r++)
        NAME(scales)((const int8_t *)b[r] + 192, NAME(half_at)(b[r] + 208), h->scale[r]);
}
UNIT(Q6_K) {
    BYTES32 packed[2], top;
    LOAD(packed[0], b + 64 * u);
    LOAD(packed[1], b + 64 * u + 32);
    LOAD(top, b + 128 + 32 * u);
    UNROLL for (int plane = 0; plane < 4; plane++) {
        BYTES32 low = NAME(field)(packed[plane & 1], plane / 2 * 4, 15);
        NAME(keep)((low | NAME(field)(top, 2 * plane - 4, 48)) - 32, q + 32 * plane);
    }
}
RUN(Q6_K) { NAME(scaled)(q + 16 * i, h->scale[r][8 * u + i], w); }

HEADS(F32) {}
UNIT(F32) {}
RUN(F32) {
    for (int j = 0; j < 16 / LANES; j++) w[j] = NAME(load)((const float *)b + j * LANES);
}

HEADS(F16) {}
UNIT(F16) {}
RUN(F16) { NAME(widen_half)(b, w); }

HEADS(BF16) {}
UNIT(BF16) {}
RUN(BF16) { NAME(widen_brain)(b, w); }

#undef HEADS
#undef UNIT
#undef RUN
