/* How each format stores its values: included once for each instruction set, after its vector layer.
 *
 * A row is a whole number of blocks. A format is taken apart in units, the stretch over which its layout repeats, and a
 * unit in runs of 16 values, which share a scale in every format:
 *
 *     HEAD(t)   head_t(block, h)          what a block's values share: scales and offsets as float32
 *     RUN(t)    run_t(block, h, u, i, w)  values 16 i .. 16 i + 15 of unit u, as 16 / LANES vectors
 *
 * Values are scale * q + offset, rounded after the product and after the sum, as dequantize.py defines them. The layouts
 * are those of ggml-common.h.
 */

typedef struct { float scale[16], offset[16]; } NAME(head);

#define HEAD(t) INLINE void NAME(head_##t)(const uint8_t *b UNUSED, NAME(head) *h UNUSED)
#define RUN(t)                                                                                                 \
    INLINE void NAME(run_##t)(const uint8_t *b, const NAME(head) *h UNUSED, int64_t u UNUSED, const int i UNUSED, \
                              VECTOR *w)

INLINE BYTES NAME(bytes)(const uint8_t *p) {
    BYTES q;
    memcpy(&q, p, 16);
    return q;
}

/* Fields of `mask` at bit `n` of each byte, moved to bit 0. */
INLINE BYTES NAME(field)(BYTES q, int64_t n, uint8_t mask) {
    return (BYTES)((WORDS)q >> (uint16_t)n) & mask;
}

INLINE void NAME(scaled)(VECTOR *w, float scale) {
    for (int j = 0; j < 16 / LANES; j++) w[j] = w[j] * NAME(all)(scale);
}

INLINE void NAME(scaled_shifted)(VECTOR *w, float scale, float offset) {
    for (int j = 0; j < 16 / LANES; j++) w[j] = w[j] * NAME(all)(scale) + NAME(all)(offset);
}

INLINE float NAME(half_at)(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return NAME(half)(bits);
}

/* Eight 6-bit scales and eight 6-bit minima in 12 bytes. Bytes 0-3 and 4-7 hold the first four of each in their low six
 * bits; their top two bits complete the last four, whose low and high nibbles are bytes 8-11. */
INLINE void NAME(scales_and_minima)(const uint8_t *b, NAME(head) *h) {
    uint32_t first, second, rest;
    uint8_t scale[8], minimum[8];
    memcpy(&first, b + 4, 4);
    memcpy(&second, b + 8, 4);
    memcpy(&rest, b + 12, 4);
    uint32_t low = first & 0x3F3F3F3F, high = (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030);
    memcpy(scale, &low, 4), memcpy(scale + 4, &high, 4);
    low = second & 0x3F3F3F3F, high = ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030);
    memcpy(minimum, &low, 4), memcpy(minimum + 4, &high, 4);
    float d = NAME(half_at)(b), m = NAME(half_at)(b + 2);
    for (int j = 0; j < 8; j++) {
        h->scale[j] = d * (float)scale[j];
        h->offset[j] = -(m * (float)minimum[j]);
    }
}

HEAD(Q4_0) { h->scale[0] = NAME(half_at)(b); }
RUN(Q4_0) {
    NAME(nibbles)(b + 2, 4 * i, h->scale[0], w, 8, 0);
}

HEAD(Q4_1) { h->scale[0] = NAME(half_at)(b), h->offset[0] = NAME(half_at)(b + 2); }
RUN(Q4_1) {
    NAME(nibbles)(b + 4, 4 * i, h->scale[0], w, 0, &h->offset[0]);
}

HEAD(Q5_0) { h->scale[0] = NAME(half_at)(b); }
RUN(Q5_0) {
    NAME(widen_signed)((NAME(field)(NAME(bytes)(b + 6), 4 * i, 15) | NAME(fifth)(b + 2 + 2 * i)) - 16, w);
    NAME(scaled)(w, h->scale[0]);
}

HEAD(Q5_1) { h->scale[0] = NAME(half_at)(b), h->offset[0] = NAME(half_at)(b + 2); }
RUN(Q5_1) {
    NAME(widen_signed)(NAME(field)(NAME(bytes)(b + 8), 4 * i, 15) | NAME(fifth)(b + 4 + 2 * i), w);
    NAME(scaled_shifted)(w, h->scale[0], h->offset[0]);
}

HEAD(Q8_0) { h->scale[0] = NAME(half_at)(b); }
RUN(Q8_0) {
    NAME(widen_signed)(NAME(bytes)(b + 2 + 16 * i), w);
    NAME(scaled)(w, h->scale[0]);
}

HEAD(Q2_K) {
    float d = NAME(half_at)(b + 80), m = NAME(half_at)(b + 82);
    for (int j = 0; j < 16; j++) h->scale[j] = d * (float)(b[j] & 15), h->offset[j] = -(m * (float)(b[j] >> 4));
}
RUN(Q2_K) {
    NAME(widen_signed)(NAME(field)(NAME(bytes)(b + 16 + 32 * u + 16 * (i & 1)), 2 * (i / 2), 3), w);
    NAME(scaled_shifted)(w, h->scale[8 * u + i], h->offset[8 * u + i]);
}

HEAD(Q3_K) { /* sixteen 6-bit scales: low bits are the nibbles of bytes 96-103, top bits the fields of 104-107 */
    float d = NAME(half_at)(b + 108);
    for (int j = 0; j < 16; j++) {
        int low = j < 8 ? b[96 + j] & 15 : b[88 + j] >> 4, high = b[104 + j % 4] >> 2 * (j / 4) & 3;
        h->scale[j] = d * (float)((low | high << 4) - 32);
    }
}
RUN(Q3_K) {
    BYTES q = NAME(field)(NAME(bytes)(b + 32 + 32 * u + 16 * (i & 1)), 2 * (i / 2), 3);
    BYTES top = NAME(field)(NAME(bytes)(b + 16 * (i & 1)), 4 * u + i / 2, 1);
    NAME(widen_signed)((q | top << 2) - 4, w);
    NAME(scaled)(w, h->scale[8 * u + i]);
}

HEAD(Q4_K) { NAME(scales_and_minima)(b, h); }
RUN(Q4_K) {
    int64_t group = 2 * u + i / 2;
    NAME(nibbles)(b + 16 + 32 * u + 16 * (i & 1), 4 * (i / 2), h->scale[group], w, 0, &h->offset[group]);
}

HEAD(Q5_K) { NAME(scales_and_minima)(b, h); }
RUN(Q5_K) {
    int64_t group = 2 * u + i / 2;
    BYTES top = NAME(field)(NAME(bytes)(b + 16 + 16 * (i & 1)), group, 1);
    NAME(widen_signed)(NAME(field)(NAME(bytes)(b + 48 + 32 * u + 16 * (i & 1)), 4 * (i / 2), 15) | top << 4, w);
    NAME(scaled_shifted)(w, h->scale[group], h->offset[group]);
}

HEAD(Q6_K) {
    float d = NAME(half_at)(b + 208);
    for (int j = 0; j < 16; j++) h->scale[j] = d * (float)(int8_t)b[192 + j];
}
RUN(Q6_K) {
    BYTES top = NAME(field)(NAME(bytes)(b + 128 + 32 * u + 16 * (i & 1)), 2 * (i / 2), 3);
    BYTES low = NAME(field)(NAME(bytes)(b + 64 * u + 16 * (i & 3)), 4 * (i / 4), 15);
    NAME(widen_signed)((low | top << 4) - 32, w);
    NAME(scaled)(w, h->scale[8 * u + i]);
}

HEAD(F32) {}
RUN(F32) {
    for (int j = 0; j < 16 / LANES; j++) w[j] = NAME(load)((const float *)b + j * LANES);
}

HEAD(F16) {}
RUN(F16) {
    NAME(widen_half)(b, w);
}

HEAD(BF16) {}
RUN(BF16) {
    NAME(widen_brain)(b, w);
}

#undef HEAD
#undef RUN
