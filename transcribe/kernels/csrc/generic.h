/* Four lanes in the vector types of GCC and Clang: what any processor has, and NEON where there is one. */
#define TARGET
#define NAME(name) name##_generic
typedef float NAME(vector) __attribute__((vector_size(16)));
typedef int32_t NAME(integers) __attribute__((vector_size(16)));
typedef uint32_t NAME(unsigned) __attribute__((vector_size(16)));
#define VECTOR NAME(vector)
#define LANES 4
#define REGISTERS 16

INLINE VECTOR NAME(all)(float value) { return (VECTOR){value, value, value, value}; }
INLINE VECTOR NAME(load)(const float *p) {
    VECTOR v;
    memcpy(&v, p, 16);
    return v;
}
INLINE void NAME(store)(float *p, VECTOR v) { memcpy(p, &v, 16); }
INLINE float NAME(total)(VECTOR v) { return (v[0] + v[2]) + (v[1] + v[3]); }

#if defined(__aarch64__)
INLINE VECTOR NAME(fused)(VECTOR a, VECTOR b, VECTOR c) {
    return (VECTOR)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE float NAME(half)(uint16_t bits) {
    __fp16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}
#else
INLINE VECTOR NAME(fused)(VECTOR a, VECTOR b, VECTOR c) { return a * b + c; }
/* float16 to float32 by a product: 2^112 moves the exponent's bias from 15 to 127, subnormal numbers included. */
INLINE float NAME(half)(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7FFF) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    memcpy(&magnitude, &value, 4);
    magnitude |= sign | ((bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0);
    memcpy(&value, &magnitude, 4);
    return value;
}
#endif

INLINE void NAME(store_brain)(uint16_t *p, VECTOR v) {
    NAME(unsigned) bits = (NAME(unsigned))v;
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    for (int j = 0; j < LANES; j++) p[j] = v[j] != v[j] ? 0x7FC0 : (uint16_t)bits[j];
}

INLINE void NAME(widen)(const int8_t *q, VECTOR *w) {
    for (int j = 0; j < 4; j++, q += 4) w[j] = __builtin_convertvector(((NAME(integers)){q[0], q[1], q[2], q[3]}), VECTOR);
}
INLINE void NAME(eight)(uint64_t bytes, float factor, float *out) {
    for (int j = 0; j < 8; j++, bytes >>= 8) out[j] = factor * (float)(bytes & 255);
}
INLINE void NAME(widen_half)(const uint8_t *p, VECTOR *w) {
    uint16_t bits[16];
    memcpy(bits, p, 32);
    for (int j = 0; j < 4; j++)
        w[j] = (VECTOR){NAME(half)(bits[4 * j]), NAME(half)(bits[4 * j + 1]), NAME(half)(bits[4 * j + 2]),
                        NAME(half)(bits[4 * j + 3])};
}
INLINE void NAME(widen_brain)(const uint8_t *p, VECTOR *w) {
    uint16_t bits[16];
    memcpy(bits, p, 32);
    for (int j = 0; j < 4; j++)
        w[j] = (VECTOR)((NAME(unsigned)){bits[4 * j], bits[4 * j + 1], bits[4 * j + 2], bits[4 * j + 3]} << 16);
}

/* Sixteen bytes twice: their low nibbles, then their high ones. */
INLINE BYTES32 NAME(twice)(const uint8_t *p) {
    uint64_t words[4];
    memcpy(words, p, 16);
    words[2] = words[0] >> 4, words[3] = words[1] >> 4;
    BYTES32 q;
    memcpy(&q, words, 32);
    return q & 15;
}

/* A byte repeated eight times keeps another bit in each copy; adding 127 carries a kept bit to bit 7. */
INLINE BYTES32 NAME(fifth)(const uint8_t *p) {
    uint64_t spread[4];
    for (int j = 0; j < 4; j++) {
        spread[j] = (p[j] * 0x0101010101010101u & 0x8040201008040201u) + 0x7F7F7F7F7F7F7F7Fu;
        spread[j] = spread[j] >> 3 & 0x1010101010101010u;
    }
    BYTES32 q;
    memcpy(&q, spread, 32);
    return q;
}
