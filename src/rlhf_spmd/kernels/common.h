// Vectors of 16 floats, their load and store in fp32 and bf16, and exp, for the kernels of this package.
//
// Every function here and in the sources does the same operations in the same order for an element whatever is computed beside
// it: that is what makes generation bit-equal to training.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <time.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int W = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(64)));
using bf16 = uint16_t;
using i64 = int64_t;

static inline vf set1(float x) { return x - vf{}; }  // x - 0 is x for every x, -0 included
static inline vf load(const float* p) { return *(const vfu*)p; }
static inline void store(float* p, vf x) { *(vfu*)p = x; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16); }

static inline vf fma(vf a, vf b, vf c) {
#ifdef __AVX512F__
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}
static inline vf max(vf a, vf b) {
#ifdef __AVX512F__
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
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

// exp(x) for x <= 88, within 2 units in the last place; 0 below -87 (no denormals). 2^n times the Taylor series of
// exp(r), |r| <= ln(2) / 2, whose first term left out is below 1e-8.
static inline vf exp(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf n = fma(x, set1(1.44269504f), set1(magic)) - magic;
  vf r = fma(n, set1(-0.693145752f), x);
  r = fma(n, set1(-1.42860677e-6f), r);
  vf p = set1(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, set1(c));
  vi bits = (vi)p + (__builtin_convertvector(n, vi) << 23);
  return x < -87.0f ? vf{} : (vf)bits;
}
// tanh(x) = 1 - 2 / (exp(2 x) + 1), to 1e-7 absolute
static inline vf tanh(vf x) {
  vf bounded = x > 20.0f ? set1(20.0f) : x;
  return 1.0f - 2.0f / (exp(2.0f * bounded) + 1.0f);
}

// 16 rows of 16 words -> their transpose
static inline void transpose(vf* rows) {
#ifdef __AVX512F__
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
#else
  vf t[W];
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) t[j][i] = rows[i][j];
  memcpy(rows, t, sizeof t);
#endif
}

static inline int num_threads(int wanted, i64 pieces) { return (int)(wanted < pieces ? wanted : pieces); }

static inline i64 microseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000ll + t.tv_nsec / 1000;
}
inline std::atomic<i64> alone_until{0}, alone_for{0};  // microseconds

// f(0) .. f(pieces - 1), ``some`` at a time to whichever of the threads is free. Where other processes want the cores too, a team
// waits a time slice for the thread that is not running, and spins, again and again; so after such a wait this thread works alone
// for a while. The results have the same bits.
template <class F> static inline void in_team(int threads, i64 pieces, i64 some, const F& f) {
  const i64 begun = threads > 1 ? microseconds() : 0;
  if (threads <= 1 || begun < alone_until.load()) {  // no region of one thread: regions inside it would start new threads each time
    for (i64 i = 0; i < pieces; i++) f(i);
    return;
  }
  i64 done = 0;  // when this thread found no more pieces
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, some) nowait
    for (i64 i = 0; i < pieces; i++) f(i);
#pragma omp master
    done = microseconds();
  }
  const i64 end = microseconds();
  if (end - done > 500 && end - done > 3 * (done - begun)) {
    const i64 before = alone_for, longer = before < 500000 ? 2 * before : before;
    alone_for = end - alone_until < before ? longer : 10000;  // longer each time that it happens again soon
    alone_until = end + alone_for;
  }
}

// Work space of a thread, kept between calls.
static inline float* scratch(int which, i64 floats) {
  struct Buffer {
    float* data = nullptr;
    i64 size = 0;
    ~Buffer() { free(data); }
  };
  static thread_local Buffer buffers[7];
  Buffer& buffer = buffers[which];
  if (buffer.size < floats) {
    free(buffer.data);
    buffer.size = floats + floats / 4 + 1024;
    buffer.data = (float*)aligned_alloc(64, (buffer.size * 4 + 63) / 64 * 64);
  }
  return buffer.data;
}
