/* Eight lanes: AVX2 with FMA and F16C. */
#define TARGET __attribute__((target("avx2,fma,f16c,bmi2")))
#define NAME(name) name##_avx2
#define VECTOR __m256
#define LANES 8
#define REGISTERS 16
#define FOUR_HALVES

INLINE VECTOR NAME(all)(float value) { return _mm256_set1_ps(value); }
INLINE VECTOR NAME(load)(const float *p) { return _mm256_loadu_ps(p); }
INLINE void NAME(store)(float *p, VECTOR v) { _mm256_storeu_ps(p, v); }
INLINE VECTOR NAME(fused)(VECTOR a, VECTOR b, VECTOR c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float NAME(half)(uint16_t bits) { return _cvtsh_ss(bits); }

INLINE float NAME(total)(VECTOR v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE void NAME(store_brain)(uint16_t *p, VECTOR v) {
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7FFF));
    rounded = _mm256_srli_epi32(rounded, 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    rounded = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(rounded));
}

INLINE void NAME(widen)(const int8_t *q, VECTOR *w) {
    for (int j = 0; j < 2; j++)
        w[j] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(q + 8 * j))));
}
INLINE void NAME(eight)(uint64_t bytes, float factor, float *out) {
    __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
    _mm256_storeu_ps(out, v * _mm256_set1_ps(factor));
    IN_MEMORY(out, 32);
}
INLINE void NAME(widen_half)(const uint8_t *p, VECTOR *w) {
    w[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    w[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)));
}
INLINE void NAME(widen_brain)(const uint8_t *p, VECTOR *w) {
    for (int j = 0; j < 2; j++) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 16 * j)));
        w[j] = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
}

/* Sixteen bytes twice: their low nibbles, then their high ones. */
INLINE BYTES32 NAME(twice)(const uint8_t *p) {
    __m256i q = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    q = _mm256_srlv_epi32(q, _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0));
    return (BYTES32)_mm256_and_si256(q, _mm256_set1_epi8(15));
}

/* 32 bits, each as bit 4 of a byte. */
INLINE BYTES32 NAME(fifth)(const uint8_t *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    const __m256i spread = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i own = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i each = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread), own);
    return (BYTES32)_mm256_and_si256(_mm256_cmpeq_epi8(each, own), _mm256_set1_epi8(16));
}
