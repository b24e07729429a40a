// Vectors of W floats, as many as one register of the processor holds: their load and store in fp32 and bf16, their transposes.
// What else differs between processors is not here but in the sizes of blocks, which follow REGISTERS.
//
// Sums over the lanes of a vector depend on W, so processors of other widths give other bits. The products do not.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
#include <immintrin.h>
#define ON_AVX512
constexpr int W = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define ON_AVX2
constexpr int W = 8, REGISTERS = 16;
#elif defined(__aarch64__)
#include <arm_neon.h>
#define ON_NEON
constexpr int W = 4, REGISTERS = 32;
#else  // no fused multiply-add: correct, and slow
#define ON_NONE
constexpr int W = 4, REGISTERS = 16;
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));
using bf16 = uint16_t;
using i64 = int64_t;

static inline vf set1(float x) { return x - vf{}; }  // x - 0 is x for every x, -0 included
static inline vi lanes() {
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return lane;
}
static inline vf load(const float* p) { return *(const vfu*)p; }
static inline void store(float* p, vf x) { *(vfu*)p = x; }
static inline vf load(const bf16* p) {
#if defined(ON_AVX2)  // of the conversion below compilers make five instructions
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(ON_NEON)
  return (vf)vshll_n_u16(vld1_u16(p), 16);
#else
  return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16);
#endif
}

static inline vf fma(vf a, vf b, vf c) {
#if defined(ON_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(ON_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(ON_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
static inline vf max(vf a, vf b) {
#if defined(ON_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(ON_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
// Round to nearest even; NaN stays NaN.
static inline void store(bf16* p, vf x) {
  vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (vu)(x == x ? (vi)rounded : vi{} + 0x7fc0);
  *(vh*)p = __builtin_convertvector(rounded, vh);
}
static inline vf round_to(vf x, const float*) { return x; }
static inline vf round_to(vf x, const bf16*) {
  bf16 narrow[W];
  store(narrow, x);
  return load(narrow);
}

// The first n (< W) elements, the others zero; and their store.
template <class T> static inline vf load_some(const T* p, int n) {
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <class T> static inline void store_some(T* p, vf x, int n) {
  T part[W];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}
#if defined(ON_AVX512)
static inline vf load_some(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
static inline void store_some(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x); }
#elif defined(ON_AVX2)
static inline vf load_some(const float* p, int n) { return (vf)_mm256_maskload_ps(p, (__m256i)(lanes() < n)); }
static inline void store_some(float* p, vf x, int n) { _mm256_maskstore_ps(p, (__m256i)(lanes() < n), (__m256)x); }
#endif
template <class T> static inline vf load_upto(const T* p, i64 n) { return n >= W ? load(p) : load_some(p, (int)n); }
template <class T> static inline void store_upto(T* p, vf x, i64 n) { n >= W ? store(p, x) : store_some(p, x, (int)n); }

static inline float sum(vf x) {
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
static inline float largest(vf x) {
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}

#if defined(ON_AVX2)
// a[i]: columns 0 to 3 of rows i and i + 4, b[i]: their columns 4 to 7 -> 8 columns
static inline void interleave(const __m256* a, const __m256* b, vf* columns) {
  for (const __m256* half : {a, b}) {
    __m256 t0 = _mm256_unpacklo_ps(half[0], half[1]), t1 = _mm256_unpackhi_ps(half[0], half[1]);
    __m256 t2 = _mm256_unpacklo_ps(half[2], half[3]), t3 = _mm256_unpackhi_ps(half[2], half[3]);
    *columns++ = (vf)_mm256_shuffle_ps(t0, t2, 0x44);
    *columns++ = (vf)_mm256_shuffle_ps(t0, t2, 0xee);
    *columns++ = (vf)_mm256_shuffle_ps(t1, t3, 0x44);
    *columns++ = (vf)_mm256_shuffle_ps(t1, t3, 0xee);
  }
}
#endif

// W rows of W words -> their transpose
static inline void transpose(vf* rows) {
#if defined(ON_AVX512)
  __m512* r = (__m512*)rows;
  __m512 t[W];
  for (int i = 0; i < W; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < W; i += 4)
    for (int j = 0; j < 2; j++) {
      __m512d lo = (__m512d)t[i + j], hi = (__m512d)t[i + j + 2];
      r[i + 2 * j] = (__m512)_mm512_unpacklo_pd(lo, hi);
      r[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(lo, hi);
    }
  for (int i = 0; i < 4; i++) {
    __m512 a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    __m512 c = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
    t[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  for (int i = 0; i < W; i++) r[i] = t[i];
#elif defined(ON_AVX2)
  __m256 a[4], b[4];
  for (int i = 0; i < 4; i++) {
    a[i] = _mm256_permute2f128_ps((__m256)rows[i], (__m256)rows[i + 4], 0x20);
    b[i] = _mm256_permute2f128_ps((__m256)rows[i], (__m256)rows[i + 4], 0x31);
  }
  interleave(a, b, rows);
#elif defined(ON_NEON)
  float32x4x2_t a = vtrnq_f32((float32x4_t)rows[0], (float32x4_t)rows[1]), b = vtrnq_f32((float32x4_t)rows[2], (float32x4_t)rows[3]);
  for (int i = 0; i < 2; i++) {
    rows[i] = (vf)vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i]));
    rows[i + 2] = (vf)vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i]));
  }
#else
  vf t[W];
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) t[j][i] = rows[i][j];
  memcpy(rows, t, sizeof t);
#endif
}

// The first W columns of W rows at a stride, of which ``rows`` and ``count`` are there, the others zero
template <class T> static inline void load_columns(const T* from, i64 stride, i64 rows, i64 count, vf* columns) {
  for (int i = 0; i < W; i++) columns[i] = i < rows ? load_upto(from + i * stride, count) : vf{};
  transpose(columns);
}
#if defined(ON_AVX2)
static inline void load_columns(const float* from, i64 stride, i64 rows, i64 count, vf* columns) {
  if (rows < W || count < W) return load_columns<float>(from, stride, rows, count, columns);
  __m256 a[4], b[4];  // loads of halves, which are cheaper than their exchange between registers
  for (int i = 0; i < 4; i++) {
    const float *near = from + i * stride, *far = near + 4 * stride;
    a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(near)), _mm_loadu_ps(far), 1);
    b[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(near + 4)), _mm_loadu_ps(far + 4), 1);
  }
  interleave(a, b, columns);
}
#endif
