// x w^T: each output element is one chain of fused multiply-adds over k in ascending order, from 0, whatever the numbers of rows
// and outputs. Vectors run over W rows of x, which are transposed first; weights are read as they lie, word by word, so nothing
// of them is packed or held twice. Near the peak of the fused multiply-add units from W rows on.
//
// bf16 is multiplied in pairs of neighbouring k where the processor does that (AVX512_BF16): to this code it is fp32 with half the
// k. Elsewhere it is widened to fp32, x with its transpose and weights some rows at a time, which stay in the first-level cache.
#include "kernels.h"

#if !defined(ON_NONE)
namespace {

struct Fp32 {
  static inline vf multiply_add(vf a, vf b, vf c) { return fma(a, b, c); }
};
#if defined(ON_AVX512) && defined(__AVX512BF16__)
#define HAS_PAIRS
struct Pairs {
  static inline vf multiply_add(vf a, vf b, vf c) { return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
};
#endif

// Rows of ``count`` words as contiguous fp32, in this thread's work space; of fp32 as they lie, at the stride that is returned
inline const float* wide(const float* from, i64& stride, i64, i64) { return from; }
inline const float* wide(const bf16* from, i64& stride, i64 rows, i64 count) {
  float* words = scratch(7, rows * count);
  for (i64 row = 0; row < rows; row++) {
    const bf16* at = from + row * stride;
    float* to = words + row * count;
    i64 i = 0;
    for (; i + W <= count; i += W) store(to + i, load(at + i));
    if (i < count) store_some(to + i, load_some(at + i, (int)(count - i)), (int)(count - i));
  }
  stride = count;
  return words;
}

// to[k][width] = from[row][k] for ``rows`` <= width rows; zeros beyond them
template <class T> void transpose_panel(const T* from, i64 stride, i64 rows, i64 k, float* to, int width) {
  vf r[W];
  for (int group = 0; group < width; group += W)
    for (i64 at = 0; at < k; at += W) {
      load_columns(from + group * stride + at, stride, rows - group, k - at, r);
      for (int i = 0; i < W && at + i < k; i++) store(to + (at + i) * width + group, r[i]);
    }
}

// acc[A][V] over k: A weight rows, each word times V vectors of the panel
template <class Op, int A, int V>
inline void chains(const float* a, i64 stride, const float* panel, i64 k, vf (&acc)[A][V], const float* ahead) {
  for (int i = 0; i < A; i++)
    for (int v = 0; v < V; v++) acc[i][v] = vf{};
  for (i64 at = 0; at < k; at++) {
    vf b[V];
    for (int v = 0; v < V; v++) b[v] = *(const vf*)(panel + (at * V + v) * W);
#pragma GCC unroll 16
    for (int i = 0; i < A; i++) {
      vf one = set1(a[i * stride + at]);
      for (int v = 0; v < V; v++) acc[i][v] = Op::multiply_add(one, b[v], acc[i][v]);
    }
    if (ahead) __builtin_prefetch(ahead + at * A, 0, 3);
  }
}

// Weight rows times V vectors of the panel: with 12, 24 sums, 2 vectors and a weight take 27 of 32 registers.
template <int V> constexpr int OUTPUTS = REGISTERS == 32 || V == 1 ? 12 : 6;

// to[A][W V]: A outputs of W V rows
template <class Op, int V, int A>
void outputs(const float* w, i64 k, const float* panel, float* to, int count, const float* ahead) {
  if constexpr (A > 1) {
    if (count < A) return outputs<Op, V, A - 1>(w, k, panel, to, count, ahead);
  }
  vf acc[A][V];
  chains<Op, A, V>(w, k, panel, k, acc, ahead);
  for (int i = 0; i < A; i++)
    for (int v = 0; v < V; v++) *(vf*)(to + (i * V + v) * W) = acc[i][v];
}

constexpr int GROUP = 48;  // outputs that are transposed together: of OUTPUTS and of W

template <class Op, int V, class T, class Out>
void panel_times(const T* x, i64 ldx, i64 rows, const T* w, i64 first_out, i64 last_out, i64 k, const float* bias, Out* out, i64 ldo) {
  constexpr int A = OUTPUTS<V>;
  float* panel = scratch(0, k * V * W);
  transpose_panel(x, ldx, rows, k, panel, V * W);
  alignas(64) float tile[GROUP * V * W];
  for (i64 n = first_out; n < last_out; n += GROUP) {
    i64 count = last_out - n < GROUP ? last_out - n : GROUP;
    for (i64 i = 0; i < count; i += A) {
      const int some = (int)(count - i < A ? count - i : A);
      i64 stride = k;
      const float *words = wide(w + (n + i) * k, stride, some, k), *ahead = nullptr;
      if (sizeof(T) == 4 && n + i + 2 * A <= last_out) ahead = words + A * k;
      outputs<Op, V, A>(words, k, panel, tile + i * V * W, some, ahead);
    }
    for (i64 i = 0; i < count; i += W) {
      const i64 some = count - i;
      vf add = bias ? load_upto(bias + n + i, some) : vf{};
      for (int v = 0; v < V; v++) {
        vf r[W];
        for (int j = 0; j < W; j++) r[j] = load(tile + ((i + j) * V + v) * W);
        transpose(r);
        for (int j = 0; j < W && v * W + j < rows; j++)
          store_upto(out + (v * W + j) * ldo + n + i, bias ? r[j] + add : r[j], some);
      }
    }
  }
}

constexpr int FEW = W / 2;

// Groups of W outputs for M rows: as many chains as hide the latency of one
template <int M> constexpr int GROUPS = W == 16 ? (M > 2 ? 1 : 2) : M == 1 ? 4 : 2;

// As panel_times for up to FEW rows, where vectors run over W outputs and it is weights that are transposed: fewer operations
template <class Op, int M, class T, class Out>
void few_times(int rows, const float* x, i64 ldx, const T* w, i64 first_out, i64 last_out, i64 k, const float* bias, Out* out, i64 ldo) {
  if constexpr (M > 1) {
    if (rows < M) return few_times<Op, M - 1>(rows, x, ldx, w, first_out, last_out, k, bias, out, ldo);
  }
  constexpr int G = GROUPS<M>, LINE = 64 / sizeof(T);
  for (i64 n = first_out; n < last_out; n += G * W) {
    vf acc[G][M];
    for (int g = 0; g < G; g++)
      for (int m = 0; m < M; m++) acc[g][m] = vf{};
    for (i64 line = 0; line < k; line += LINE) {  // each is read once: many rows at a stride push each other out of the cache
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const T* from = w + (n + g * W) * k + line;
        for (int i = 0; W == 16 && i < W; i++) __builtin_prefetch(from + (i + G * W) * k, 0, 3);
        for (i64 at = line; at < k && at < line + LINE; at += W, from += W) {
          const int count = k - at < W ? (int)(k - at) : W;
          vf r[W];
          load_columns(from, k, last_out - n - g * W, k - at, r);
          auto step = [&](int i) {
            for (int m = 0; m < M; m++) acc[g][m] = Op::multiply_add(set1(x[m * ldx + at + i]), r[i], acc[g][m]);
          };
          if (count == W) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) step(i);
          } else {
            for (int i = 0; i < count; i++) step(i);
          }
        }
      }
    }
    for (int g = 0; g < G && n + g * W < last_out; g++) {
      const i64 some = last_out - n - g * W;
      const vf add = bias ? load_upto(bias + n + g * W, some) : vf{};
      for (int m = 0; m < M; m++) store_upto(out + m * ldo + n + g * W, bias ? acc[g][m] + add : acc[g][m], some);
    }
  }
}

constexpr i64 WORTH_A_TEAM = 1 << 21;  // multiply-adds, about 20 microseconds

template <class Op, class T, class Out>
void linear(const T* x, i64 ldx, i64 m, const T* w, i64 n, i64 k, const float* bias, Out* out, int threads) {
  const i64 groups = (n + GROUP - 1) / GROUP;
  const int team = (m + W - 1) / W * W * n * k < WORTH_A_TEAM ? 1 : num_threads(threads, groups);
  in_team(team, team, 1, [&](i64 part) {
    i64 from = groups * part / team * GROUP, to = groups * (part + 1) / team * GROUP;
    if (to > n) to = n;
    for (i64 row = 0; row < m; row += 2 * W) {
      i64 rows = m - row < 2 * W ? m - row : 2 * W;
      if (rows <= FEW) {
        i64 stride = ldx;
        const float* words = wide(x + row * ldx, stride, rows, k);
        few_times<Op, FEW>((int)rows, words, stride, w, from, to, k, bias, out + row * n, n);
      } else if (rows > W) panel_times<Op, 2>(x + row * ldx, ldx, rows, w, from, to, k, bias, out + row * n, n);
      else panel_times<Op, 1>(x + row * ldx, ldx, rows, w, from, to, k, bias, out + row * n, n);
    }
  });
}

// x and w bf16
template <class Out>
void linear_half(const void* x, i64 ldx, i64 m, const void* w, i64 n, i64 k, const float* bias, Out* out, int threads) {
#ifdef HAS_PAIRS
  linear<Pairs>((const float*)x, ldx / 2, m, (const float*)w, n, k / 2, bias, out, threads);
#else
  linear<Fp32>((const bf16*)x, ldx, m, (const bf16*)w, n, k, bias, out, threads);
#endif
}

}  // namespace
#endif

extern "C" {

// Which products are here: bit 0 fp32, bit 1 bf16; bit 2: the processor multiplies bf16 itself.
int linear_kinds() {
#if defined(ON_NONE)
  return 0;
#elif defined(HAS_PAIRS)
  return 7;
#else
  return 3;
#endif
}

// out [m, n] = x [m, k] w [n, k]^T (+ bias [n], fp32). kind 0: all fp32; 1: x and w bf16, out bf16; 2: x and w bf16, out fp32.
// Rows of x lie ldx elements apart, w and out are contiguous; bf16 wants even k and ldx.
void linear_forward(int kind, const void* x, i64 ldx, i64 m, const void* w, i64 n, i64 k, const float* bias, void* out, int threads) {
#if !defined(ON_NONE)
  if (kind == 0) linear<Fp32>((const float*)x, ldx, m, (const float*)w, n, k, bias, (float*)out, threads);
  else if (kind == 1) linear_half(x, ldx, m, w, n, k, bias, (bf16*)out, threads);
  else linear_half(x, ldx, m, w, n, k, bias, (float*)out, threads);
#endif
}
}
