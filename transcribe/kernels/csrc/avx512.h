/* Sixteen lanes: AVX-512 (F, BW, VL, DQ). */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")))
#define NAME(name) name##_avx512
#define VECTOR __m512
#define LANES 16
#define REGISTERS 32
#define FOUR_HALVES
#define OWN_NIBBLES

INLINE VECTOR NAME(all)(float value) { return _mm512_set1_ps(value); }
INLINE VECTOR NAME(load)(const float *p) { return _mm512_loadu_ps(p); }
INLINE void NAME(store)(float *p, VECTOR v) { _mm512_storeu_ps(p, v); }
INLINE VECTOR NAME(fused)(VECTOR a, VECTOR b, VECTOR c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float NAME(total)(VECTOR v) { return _mm512_reduce_add_ps(v); }
INLINE float NAME(half)(uint16_t bits) { return _cvtsh_ss(bits); }

INLINE void NAME(store_brain)(uint16_t *p, VECTOR v) {
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7FFF));
    rounded = _mm512_srli_epi32(rounded, 16);
    rounded = _mm512_mask_set1_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), 0x7FC0);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}

INLINE void NAME(widen)(const int8_t *q, VECTOR *w) {
    w[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)q)));
}
INLINE void NAME(eight)(uint64_t bytes, float factor, float *out) {
    __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
    _mm256_storeu_ps(out, v * _mm256_set1_ps(factor));
    IN_MEMORY(out, 32);
}
INLINE void NAME(widen_half)(const uint8_t *p, VECTOR *w) {
    w[0] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void NAME(widen_brain)(const uint8_t *p, VECTOR *w) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE BYTES32 NAME(twice)(const uint8_t *p) {
    __m256i q = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    q = _mm256_srlv_epi32(q, _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0));
    return (BYTES32)_mm256_and_si256(q, _mm256_set1_epi8(15));
}

INLINE BYTES32 NAME(fifth)(const uint8_t *p) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    return (BYTES32)_mm256_maskz_set1_epi8(bits, 16);
}

/* A nibble has sixteen values: they are computed once a group and looked up. The permutation reads the low four bits of
 * each lane only, so nothing need be masked. */
INLINE void NAME(nibbles)(const uint8_t *p, const int shift, float scale, VECTOR *w, const int zero, const float *offset) {
    const VECTOR count = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    VECTOR values = (count - NAME(all)((float)zero)) * NAME(all)(scale);
    if (offset) values = values + NAME(all)(*offset);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    w[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, shift), values);
}
