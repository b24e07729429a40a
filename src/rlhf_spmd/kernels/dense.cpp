// x w^T: each output element is one chain of fused multiply-adds over k in ascending order, from 0, whatever the numbers of rows
// and outputs. Vectors run over 16 rows of x, which are transposed first; weights are read as they lie, word by word, so nothing
// of them is packed or held twice. Near the peak of the fused multiply-add units from 16 rows on.
//
// bf16 is multiplied in pairs of neighbouring k (AVX512_BF16): to this code it is fp32 with half the k.
#include "kernels.h"

#if defined(__AVX512F__)
namespace {

struct Fp32 {
  static inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};
#ifdef __AVX512BF16__
struct Pairs {
  static inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
};
#endif

inline __mmask16 first(i64 n) { return n >= W ? 0xffff : (__mmask16)((1u << n) - 1); }

// to[k][width] = from[row][k] for ``rows`` <= width rows; zeros beyond them
void transpose_panel(const float* from, i64 stride, i64 rows, i64 k, float* to, int width) {
  vf r[W];
  for (int group = 0; group < width; group += W)
    for (i64 at = 0; at < k; at += W) {
      __mmask16 mask = first(k - at);
      for (int i = 0; i < W; i++)
        r[i] = group + i < rows ? (vf)_mm512_maskz_loadu_ps(mask, from + (group + i) * stride + at) : vf{};
      transpose(r);
      for (int i = 0; i < W && at + i < k; i++) store(to + (at + i) * width + group, r[i]);
    }
}

inline void put(float* out, vf x, __mmask16 mask) { _mm512_mask_storeu_ps(out, mask, (__m512)x); }
inline void put(bf16* out, vf x, __mmask16 mask) {
  if (mask == 0xffff) store(out, x);
  else store_some(out, x, __builtin_popcount(mask));
}

// acc[A][V] over k: A weight rows, each word times V vectors of the panel
template <class Op, int A, int V>
inline void chains(const float* a, i64 stride, const float* panel, i64 k, __m512 (&acc)[A][V], const float* ahead) {
  for (int i = 0; i < A; i++)
    for (int v = 0; v < V; v++) acc[i][v] = _mm512_setzero_ps();
  for (i64 at = 0; at < k; at++) {
    __m512 b[V];
    for (int v = 0; v < V; v++) b[v] = _mm512_load_ps(panel + (at * V + v) * W);
#pragma GCC unroll 16
    for (int i = 0; i < A; i++) {
      __m512 one = _mm512_set1_ps(a[i * stride + at]);
      for (int v = 0; v < V; v++) acc[i][v] = Op::fma(one, b[v], acc[i][v]);
    }
    if (ahead) _mm_prefetch((const char*)(ahead + at * A), _MM_HINT_T0);
  }
}

constexpr int A_MAX = 12;  // 24 sums, 2 vectors of the panel and a weight: 27 of 32 registers

// to[A][16 V]: A outputs of 16 V rows
template <class Op, int V, int A>
void outputs(const float* w, i64 k, const float* panel, float* to, int count, const float* ahead) {
  if constexpr (A > 1) {
    if (count < A) return outputs<Op, V, A - 1>(w, k, panel, to, count, ahead);
  }
  __m512 acc[A][V];
  chains<Op, A, V>(w, k, panel, k, acc, ahead);
  for (int i = 0; i < A; i++)
    for (int v = 0; v < V; v++) _mm512_store_ps(to + (i * V + v) * W, acc[i][v]);
}

constexpr int GROUP = 48;  // outputs that are transposed together: of A_MAX and of W

template <class Op, int V, class Out>
void panel_times(const float* x, i64 ldx, i64 rows, const float* w, i64 first_out, i64 last_out, i64 k, const float* bias, Out* out,
         i64 ldo) {
  float* panel = scratch(0, k * V * W);
  transpose_panel(x, ldx, rows, k, panel, V * W);
  alignas(64) float tile[GROUP * V * W];
  for (i64 n = first_out; n < last_out; n += GROUP) {
    i64 count = last_out - n < GROUP ? last_out - n : GROUP;
    for (i64 i = 0; i < count; i += A_MAX) {
      const float* ahead = n + i + 2 * A_MAX <= last_out ? w + (n + i + A_MAX) * k : nullptr;
      outputs<Op, V, A_MAX>(w + (n + i) * k, k, panel, tile + i * V * W, (int)(count - i < A_MAX ? count - i : A_MAX), ahead);
    }
    for (i64 i = 0; i < count; i += W) {
      __mmask16 mask = first(count - i);
      vf add = bias ? (vf)_mm512_maskz_loadu_ps(mask, bias + n + i) : vf{};
      for (int v = 0; v < V; v++) {
        vf r[W];
        for (int j = 0; j < W; j++) r[j] = load(tile + ((i + j) * V + v) * W);
        transpose(r);
        for (int j = 0; j < W && v * W + j < rows; j++)
          put(out + (v * W + j) * ldo + n + i, bias ? r[j] + add : r[j], mask);
      }
    }
  }
}

constexpr int FEW = 8;

// As panel_times for up to FEW rows, where vectors run over 16 outputs and it is weights that are transposed: fewer operations
template <class Op, int M, class Out>
void few_times(int rows, const float* x, i64 ldx, const float* w, i64 first_out, i64 last_out, i64 k, const float* bias, Out* out,
               i64 ldo) {
  if constexpr (M > 1) {
    if (rows < M) return few_times<Op, M - 1>(rows, x, ldx, w, first_out, last_out, k, bias, out, ldo);
  }
  constexpr int G = M > 2 ? 1 : 2;  // groups of outputs: as many chains as hide the latency of one
  for (i64 n = first_out; n < last_out; n += G * W) {
    __m512 acc[G][M];
    for (int g = 0; g < G; g++)
      for (int m = 0; m < M; m++) acc[g][m] = _mm512_setzero_ps();
    for (i64 at = 0; at < k; at += W) {
      const __mmask16 mask = first(k - at);
      const int count = k - at < W ? (int)(k - at) : W;
      for (int g = 0; g < G; g++) {
        vf r[W];
        for (int i = 0; i < W; i++) {
          const i64 row = n + g * W + i;
          r[i] = row < last_out ? (vf)_mm512_maskz_loadu_ps(mask, w + row * k + at) : vf{};
          _mm_prefetch((const char*)(w + (row + G * W) * k + at), _MM_HINT_T0);
        }
        transpose(r);
        auto step = [&](int i) {
          for (int m = 0; m < M; m++) acc[g][m] = Op::fma(_mm512_set1_ps(x[m * ldx + at + i]), (__m512)r[i], acc[g][m]);
        };
        if (count == W) {
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) step(i);
        } else {
          for (int i = 0; i < count; i++) step(i);
        }
      }
    }
    for (int g = 0; g < G && n + g * W < last_out; g++) {
      const __mmask16 mask = first(last_out - n - g * W);
      const vf add = bias ? (vf)_mm512_maskz_loadu_ps(mask, bias + n + g * W) : vf{};
      for (int m = 0; m < M; m++) put(out + m * ldo + n + g * W, bias ? (vf)acc[g][m] + add : (vf)acc[g][m], mask);
    }
  }
}

constexpr i64 WORTH_A_TEAM = 1 << 21;  // multiply-adds, about 20 microseconds

template <class Op, class Out>
void linear(const float* x, i64 ldx, i64 m, const float* w, i64 n, i64 k, const float* bias, Out* out, int threads) {
  const i64 groups = (n + GROUP - 1) / GROUP;
  const int team = (m + W - 1) / W * W * n * k < WORTH_A_TEAM ? 1 : num_threads(threads, groups);
  in_team(team, team, 1, [&](i64 part) {
    i64 from = groups * part / team * GROUP, to = groups * (part + 1) / team * GROUP;
    if (to > n) to = n;
    for (i64 row = 0; row < m; row += 2 * W) {
      i64 rows = m - row < 2 * W ? m - row : 2 * W;
      if (rows <= FEW) few_times<Op, FEW>((int)rows, x + row * ldx, ldx, w, from, to, k, bias, out + row * n, n);
      else if (rows > W) panel_times<Op, 2>(x + row * ldx, ldx, rows, w, from, to, k, bias, out + row * n, n);
      else panel_times<Op, 1>(x + row * ldx, ldx, rows, w, from, to, k, bias, out + row * n, n);
    }
  });
}

}  // namespace
#endif

extern "C" {

// Which products are here: bit 0 fp32, bit 1 bf16.
int linear_kinds() {
#if defined(__AVX512F__) && defined(__AVX512BF16__)
  return 3;
#elif defined(__AVX512F__)
  return 1;
#else
  return 0;
#endif
}

// out [m, n] = x [m, k] w [n, k]^T (+ bias [n], fp32). kind 0: all fp32; 1: x and w bf16, out bf16; 2: x and w bf16, out fp32.
// Rows of x lie ldx elements apart, w and out are contiguous; bf16 wants even k and ldx.
void linear_forward(int kind, const void* x, i64 ldx, i64 m, const void* w, i64 n, i64 k, const float* bias, void* out, int threads) {
#ifdef __AVX512F__
  if (kind == 0) linear<Fp32>((const float*)x, ldx, m, (const float*)w, n, k, bias, (float*)out, threads);
#ifdef __AVX512BF16__
  else if (kind == 1)
    linear<Pairs>((const float*)x, ldx / 2, m, (const float*)w, n, k / 2, bias, (bf16*)out, threads);
  else linear<Pairs>((const float*)x, ldx / 2, m, (const float*)w, n, k / 2, bias, (float*)out, threads);
#endif
#endif
}
}
