// Norm, rotary embedding, gated activation and the statistics of logits: each row by itself, each element by the same operations
// wherever in its row and batch it lies. fp32 arithmetic, rounded once to bf16 where that is the storage.
#include "kernels.h"

namespace {

template <class T>
void norm(const T* x, i64 outer, i64 stride, i64 inner, i64 n, const T* weight, int unit_offset, float eps, T* out,
          i64 out_stride, float* scales) {
  for (i64 row = 0; row < outer * inner; row++) {
    const T* from = x + row / inner * stride + row % inner * n;
    T* to = out + row / inner * out_stride + row % inner * n;
    vf squares[2] = {};
    for (i64 at = 0; at < n; at += W) {
      vf one = load_upto(from + at, n - at);
      squares[at / W & 1] = fma(one, one, squares[at / W & 1]);
    }
    const float scale = 1.0f / sqrtf(sum(squares[0] + squares[1]) / (float)n + eps);
    if (scales) scales[row] = scale;
    for (i64 at = 0; at < n; at += W) {
      vf normal = load_upto(from + at, n - at) * scale, factor = load_upto(weight + at, n - at);
      normal = unit_offset ? normal * (factor + 1.0f) : round_to(normal, from) * factor;
      store_upto(to + at, normal, n - at);
    }
  }
}

template <class T>
void rotary(const T* x, i64 tokens, i64 stride, i64 heads, i64 dim, i64 pairs, const T* cos, const T* sin, int interleaved, T* out,
            i64 out_stride) {
  for (i64 token = 0; token < tokens; token++) {
    for (i64 at = 0; at < pairs; at += W) {
      const i64 n = pairs - at, m = n < W ? n : W;
      const vf c = load_upto(cos + token * pairs + at, n), s = load_upto(sin + token * pairs + at, n);
      for (i64 head = 0; head < heads; head++) {
        const T* from = x + token * stride + head * dim;
        T* to = out + token * out_stride + head * dim;
        T left[W], right[W];
        for (i64 i = 0; interleaved && i < m; i++) left[i] = from[2 * (at + i)], right[i] = from[2 * (at + i) + 1];
        const vf a = load_upto(interleaved ? left : from + at, n), b = load_upto(interleaved ? right : from + pairs + at, n);
        store_upto(interleaved ? left : to + at, fma(a, c, -(b * s)), n);
        store_upto(interleaved ? right : to + pairs + at, fma(b, c, a * s), n);
        for (i64 i = 0; interleaved && i < m; i++) to[2 * (at + i)] = left[i], to[2 * (at + i) + 1] = right[i];
      }
    }
    for (i64 head = 0; out != x && 2 * pairs < dim && head < heads; head++)
      memcpy(out + token * out_stride + head * dim + 2 * pairs, x + token * stride + head * dim + 2 * pairs,
             (dim - 2 * pairs) * sizeof(T));
  }
}

inline vf activate(vf x, int gelu) {
  if (gelu) return 0.5f * x * (1.0f + tanh(0.797884561f * fma(x * x * x, set1(0.044715f), x)));
  return x / (1.0f + exp(-x > 80.0f ? set1(80.0f) : -x));
}

template <class T> void gated(const T* gate_up, i64 rows, i64 n, int gelu, T* out) {
  for (i64 row = 0; row < rows; row++)
    for (i64 at = 0; at < n; at += W) {
      const T* gate = gate_up + row * 2 * n + at;
      vf active = round_to(activate(load_upto(gate, n - at), gelu), gate);
      store_upto(out + row * n + at, active * load_upto(gate + n, n - at), n - at);
    }
}

// grad [rows, n] of the result -> out [rows, 2 n], the gradients of gate and up
template <class T> void gated_gradients(const T* gate_up, const T* grad, i64 rows, i64 n, int gelu, T* out, int threads) {
  in_team(threads, rows, 8, [&](i64 row) {
    for (i64 at = 0; at < n; at += W) {
      const T* from = gate_up + row * 2 * n + at;
      const vf x = load_upto(from, n - at), up = load_upto(from + n, n - at), d = load_upto(grad + row * n + at, n - at);
      vf share, slope;  // the activation is x * share
      if (gelu) {
        const vf u = 0.797884561f * fma(x * x * x, set1(0.044715f), x), size = u < 0.0f ? -u : u;
        const vf rest = 1.0f / (exp(2.0f * (size > 20.0f ? set1(20.0f) : size)) + 1.0f);  // (1 - tanh(size)) / 2, not rounded off
        share = u < 0.0f ? rest : 1.0f - rest;
        slope = share + 2.0f * x * rest * (1.0f - rest) * 0.797884561f * (1.0f + 0.134145f * x * x);
      } else {
        share = 1.0f / (1.0f + exp(-x > 80.0f ? set1(80.0f) : -x));
        slope = share * (1.0f + x * (1.0f - share));
      }
      store_upto(out + row * 2 * n + at, d * up * slope, n - at);
      store_upto(out + row * 2 * n + n + at, d * x * share, n - at);
    }
  });
}

template <class T>
void norm_gradients(const T* x, const float* scales, i64 rows, i64 n, const T* weight, int unit_offset, const T* grad, T* out,
                    float* grad_weight) {
  memset(grad_weight, 0, n * 4);
  for (i64 row = 0; row < rows; row++) {
    const T *from = x + row * n, *d = grad + row * n;
    const float scale = scales[row];
    auto weighted = [&](i64 at) { return load_upto(d + at, n - at) * (load_upto(weight + at, n - at) + (unit_offset ? 1.0f : 0.0f)); };
    vf along = {};
    for (i64 at = 0; at < n; at += W) {
      const vf normal = load_upto(from + at, n - at) * scale;
      along = fma(weighted(at), normal, along);
      store_upto(grad_weight + at, fma(load_upto(d + at, n - at), normal, load_upto(grad_weight + at, n - at)), n - at);
    }
    const float mean = sum(along) / (float)n * scale;
    for (i64 at = 0; at < n; at += W)
      store_upto(out + row * n + at, fma(load_upto(from + at, n - at), set1(-mean), weighted(at)) * scale, n - at);
  }
}

// logits beyond n count as minus infinity
inline vf part_of(const float* logits, i64 at, i64 n) {
  if (at + W <= n) return load(logits + at);
  return lanes() < (int32_t)(n - at) ? load_some(logits + at, (int)(n - at)) : set1(-INFINITY);
}

float largest_of(const float* logits, i64 n) {
  const vf none = set1(-INFINITY);
  vf tops[4] = {none, none, none, none};
  for (i64 at = 0; at < n; at += W) tops[at / W & 3] = max(tops[at / W & 3], part_of(logits, at, n));
  return largest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
}

constexpr i64 BLOCK = 256;  // weights that are added in fp32; their sums are added in fp64

i64 draw_row(const float* logits, i64 n, float temperature, double uniform) {
  const i64 blocks = (n + BLOCK - 1) / BLOCK;
  float *weights = scratch(0, blocks * BLOCK + blocks), *sums = weights + blocks * BLOCK;
  const float top = largest_of(logits, n);
  double total = 0;
  for (i64 block = 0; block < blocks; block++) {
    vf added = {};
    for (i64 at = block * BLOCK; at < (block + 1) * BLOCK; at += W) {
      vf weight = at < n ? exp((part_of(logits, at, n) - top) / temperature) : vf{};
      store(weights + at, weight);
      added += weight;
    }
    total += sums[block] = sum(added);
  }
  const double goal = uniform * total;
  double before = 0;
  i64 block = 0, drawn = 0;
  while (block + 1 < blocks && before + sums[block] <= goal) before += sums[block++];
  for (i64 at = block * BLOCK; at < (block + 1) * BLOCK && at < n && before <= goal; at++) {
    before += weights[at];
    if (weights[at] > 0) drawn = at;  // the last one of the block stays where rounding leaves the goal unreached
  }
  return drawn;
}

// For about 10 microseconds of work and more
inline int team_for(i64 elements, int threads) { return elements > 1 << 16 ? threads : 1; }

}  // namespace

extern "C" {

// Of each row of logits [rows, n], with a stride from row to row, where its largest is, the first of equal ones.
void argmax(const float* logits, i64 rows, i64 n, i64 stride, i64* out, int threads) {
  in_team(team_for(rows * n, threads), rows, 8, [&](i64 row) {
    const float *l = logits + row * stride, top = largest_of(l, n);
    i64 at = 0;
    while (at + BLOCK < n && largest_of(l + at, BLOCK) != top) at += BLOCK;
    while (at + 1 < n && l[at] != top) at++;
    out[row] = at;
  });
}

// Token ids [rows] from logits [rows, n], with a stride from row to row, at a temperature: the first whose cumulative probability
// exceeds uniforms [rows].
void draw(const float* logits, i64 rows, i64 n, i64 stride, float temperature, const double* uniforms, i64* out, int threads) {
  auto draw = [&](i64 row) { out[row] = draw_row(logits + row * stride, n, temperature, uniforms[row]); };
  in_team(team_for(rows * n, threads), rows, 8, draw);
}

// x [outer, inner, n] -> out (may be x): weight [n] * x / sqrt(mean(x^2) + eps), with unit_offset (1 + weight) * ...; strides from outer
// to outer. scales [outer * inner] or null: 1 / sqrt(mean(x^2) + eps).
void rms_norm(int half, const void* x, i64 outer, i64 stride, i64 inner, i64 n, const void* weight, int unit_offset, float eps,
              void* out, i64 out_stride, float* scales) {
  if (half) norm((const bf16*)x, outer, stride, inner, n, (const bf16*)weight, unit_offset, eps, (bf16*)out, out_stride, scales);
  else norm((const float*)x, outer, stride, inner, n, (const float*)weight, unit_offset, eps, (float*)out, out_stride, scales);
}

// x [tokens, heads, dim] -> out (may be x), strides from token to token; cos and sin [tokens, pairs] of the first 2 * pairs dims.
// Pairs are halves of these, or with interleaved neighbours.
void rotate(int half, const void* x, i64 tokens, i64 stride, i64 heads, i64 dim, i64 pairs, const void* cos, const void* sin,
            int interleaved, void* out, i64 out_stride) {
  if (half)
    rotary((const bf16*)x, tokens, stride, heads, dim, pairs, (const bf16*)cos, (const bf16*)sin, interleaved, (bf16*)out, out_stride);
  else
    rotary((const float*)x, tokens, stride, heads, dim, pairs, (const float*)cos, (const float*)sin, interleaved, (float*)out,
           out_stride);
}

// gate_up [rows, 2 n] -> out [rows, n]: silu(gate) * up, or gelu(gate) * up in its tanh form.
void gated_linear(int half, const void* gate_up, i64 rows, i64 n, int gelu, void* out) {
  if (half) gated((const bf16*)gate_up, rows, n, gelu, (bf16*)out);
  else gated((const float*)gate_up, rows, n, gelu, (float*)out);
}

// Gradients of rms_norm (x and grad contiguous, [rows, n]) from its scales: of x -> out, of the weight -> grad_weight [n].
void rms_norm_backward(int half, const void* x, const float* scales, i64 rows, i64 n, const void* weight, int unit_offset,
                       const void* grad, void* out, float* grad_weight) {
  if (half)
    norm_gradients((const bf16*)x, scales, rows, n, (const bf16*)weight, unit_offset, (const bf16*)grad, (bf16*)out, grad_weight);
  else norm_gradients((const float*)x, scales, rows, n, (const float*)weight, unit_offset, (const float*)grad, (float*)out, grad_weight);
}

// Gradients of gated_linear: grad [rows, n] -> out [rows, 2 n].
void gated_linear_backward(int half, const void* gate_up, const void* grad, i64 rows, i64 n, int gelu, void* out, int threads) {
  threads = team_for(rows * n, threads);
  if (half) gated_gradients((const bf16*)gate_up, (const bf16*)grad, rows, n, gelu, (bf16*)out, threads);
  else gated_gradients((const float*)gate_up, (const float*)grad, rows, n, gelu, (float*)out, threads);
}

// Logits [rows, n] -> in their place the gradients of log-probs of labels (as below) times grads [rows]; log_z: log-sum-exp of all
void logit_gradients(float* logits, i64 rows, i64 n, const i64* labels, i64 first, const float* log_z, const float* grads, int threads) {
  in_team(team_for(rows * n, threads), rows, 8, [&](i64 row) {
    float* l = logits + row * n;
    for (i64 at = 0; at < n; at += W) store_upto(l + at, exp(load_upto(l + at, n - at) - log_z[row]) * -grads[row], n - at);
    const i64 label = labels[row] - first;
    if (label >= 0 && label < n) l[label] += grads[row];
  });
}

// Of each row of logits [rows, n]: largest (l'), sum of exp(l - l'), the label's logit (0 where labels[row] - first lies outside),
// and with ``entropy`` the sum of exp(l - l') (l - l'), else 0 -> out [4, rows].
void logit_statistics(const float* logits, i64 rows, i64 n, const i64* labels, i64 first, int entropy, float* out,
                      int threads) {
  in_team(team_for(rows * n, threads), rows, 8, [&](i64 row) {
    const float *l = logits + row * n, top = largest_of(l, n);
    vf sums[4] = {}, weighted = {};
    for (i64 at = 0; at < n; at += W) {
      vf shifted = part_of(l, at, n) - top, e = exp(shifted);
      sums[at / W & 3] += e;
      if (entropy) weighted += e > 0.0f ? e * shifted : vf{};  // 0 times minus infinity counts as 0
    }
    const i64 label = labels[row] - first;
    out[row] = top;
    out[rows + row] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    out[2 * rows + row] = label >= 0 && label < n ? l[label] : 0.0f;
    out[3 * rows + row] = entropy ? sum(weighted) : 0.0f;
  });
}
}
