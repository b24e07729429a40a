// Causal attention of packed sequences and over a paged cache, by the same inner routines.
//
// For one query of one head: each score is a chain of fused multiply-adds over head_dim; the softmax runs over vectors of W keys
// that are aligned to the key's position; the output is, per dimension, one chain over the keys (two, of even and odd positions,
// where head_dim is at most TWO_CHAINS), starting from 0. Nothing of that depends on the other queries, on pages or on threads, so the
// two give the same bits. Up to ROWS queries (tokens by heads of a group) share the loads of keys and values.
//
// Keys lie transposed, [head_dim][keys]: vectors run over keys without horizontal sums. fp32 arithmetic for bf16 storage.
#include "kernels.h"

namespace {

constexpr int ROWS = 6;
constexpr i64 TWO_CHAINS = REGISTERS == 32 ? 2 * W : W;

// Vectors that R rows multiply at a time: the sums fit into the registers, and of one row are enough to hide the latency.
template <int R> constexpr int ACROSS = REGISTERS == 32 ? 4 : R == 1 ? 8 : R == 2 ? 4 : 2;
constexpr int narrower(int vectors) { return REGISTERS == 32 ? 1 : vectors / 2; }

struct Rule {
  i64 dim, group;
  float scale, softcap;  // softcap 0: none
  i64 window;            // 0: none
  const float* sinks = nullptr;  // one more score of each query head, whose value is 0; null: none
  Rule of_head(i64 head) const {
    Rule own = *this;
    if (sinks) own.sinks += head * group;
    return own;
  }
  i64 padded() const { return (dim + W - 1) / W * W; }
  i64 chains() const { return padded() <= TWO_CHAINS ? 2 : 1; }
  i64 first_key(i64 position) const { return window && position >= window ? position - window + 1 : 0; }
};

template <class T> struct Run {  // keys first .. first + count - 1
  const T *k, *v;
  i64 k_stride, v_stride, first, count;
};

// What the products fetch into the second-level cache on their way, one line for each they read: at the addresses of their own
// keys or values, moved by ``offset`` bytes. Single queries wait for memory otherwise: 3 times as long where it is all they do.
struct Ahead {
  i64 offset = 0;  // 0: nothing
  template <class T> void fetch(const T* at) const {
    if (offset) __builtin_prefetch((const char*)at + offset, 0, 2);
  }
};
template <class T> constexpr int LINE = 64 / (W * (int)sizeof(T));  // vectors

template <int R, int V, class T>
void multiply_keys(const float* q, i64 q_stride, i64 dim, const T* k, i64 k_stride, float* s, i64 s_stride, Ahead ahead) {
  vf acc[R][V] = {};
  for (i64 d = 0; d < dim; d++) {
    vf keys[V];
    for (int v = 0; v < V; v++) keys[v] = load(k + d * k_stride + v * W);
    for (int v = 0; v < V; v += LINE<T>) ahead.fetch(k + d * k_stride + v * W);
    for (int r = 0; r < R; r++) {
      vf one = set1(q[r * q_stride + d]);
      for (int v = 0; v < V; v++) acc[r][v] = fma(one, keys[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(s + r * s_stride + v * W, acc[r][v]);
}

template <int R, int V, class T>
void scores_across(const float* q, i64 q_stride, i64 dim, const Run<T>& run, i64 begin, i64 end, float* s, i64 s_stride, Ahead ahead) {
  for (; begin + (V > 1 ? V * W : 1) <= end; begin += V * W)
    multiply_keys<R, V>(q, q_stride, dim, run.k + begin, run.k_stride, s + begin, s_stride, ahead);
  if constexpr (V > 1) scores_across<R, narrower(V)>(q, q_stride, dim, run, begin, end, s, s_stride, ahead);
}

template <int R, class T>
void scores(int rows, const float* q, i64 q_stride, i64 dim, const Run<T>& run, i64 begin, i64 end, float* s, i64 s_stride,
            Ahead ahead = {}) {
  if constexpr (R > 1) {
    if (rows < R) return scores<R - 1>(rows, q, q_stride, dim, run, begin, end, s, s_stride, ahead);
  }
  scores_across<R, ACROSS<R>>(q, q_stride, dim, run, begin, end, s, s_stride, ahead);
}

// acc[R][V][C] += p v over the run's keys begin .. end - 1, key j to chain j % C
template <int R, int V, int C, class T>
void multiply_values(const float* p, i64 p_stride, const Run<T>& run, i64 begin, i64 end, i64 dim_at, float* acc, i64 acc_stride,
                     Ahead ahead) {
  vf a[R][V][C];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      for (int c = 0; c < C; c++) a[r][v][c] = load(acc + r * acc_stride + (v * C + c) * W);
  auto step = [&](i64 j, auto chain) {
    constexpr int c = decltype(chain)::value;
    vf values[V];
    for (int v = 0; v < V; v++) values[v] = load(run.v + j * run.v_stride + dim_at + v * W);
    for (int v = 0; v < V; v += LINE<T>) ahead.fetch(run.v + j * run.v_stride + dim_at + v * W);
    for (int r = 0; r < R; r++) {
      vf one = set1(p[r * p_stride + j]);
      for (int v = 0; v < V; v++) a[r][v][c] = fma(one, values[v], a[r][v][c]);
    }
  };
  std::integral_constant<int, 0> even;
  std::integral_constant<int, C - 1> odd;
  i64 j = begin;
  if (C == 2 && j < end && ((run.first + j) & 1)) step(j++, odd);
  for (; j + 1 < end; j += 2) {
    step(j, even);
    step(j + 1, odd);
  }
  if (j < end) step(j, even);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      for (int c = 0; c < C; c++) store(acc + r * acc_stride + (v * C + c) * W, a[r][v][c]);
}

template <int R, int V, class T>
void values_across(const float* p, i64 p_stride, const Run<T>& run, i64 begin, i64 end, i64 d, i64 padded, float* acc, i64 acc_stride,
                   Ahead ahead) {
  for (; d + V * W <= padded; d += V * W) multiply_values<R, V, 1>(p, p_stride, run, begin, end, d, acc + d, acc_stride, ahead);
  if constexpr (V > 1) values_across<R, narrower(V)>(p, p_stride, run, begin, end, d, padded, acc, acc_stride, ahead);
}

template <int R, class T>
void values(int rows, const float* p, i64 p_stride, const Run<T>& run, i64 begin, i64 end, i64 padded, float* acc, i64 acc_stride,
            Ahead ahead = {}) {
  if constexpr (R > 1) {
    if (rows < R) return values<R - 1>(rows, p, p_stride, run, begin, end, padded, acc, acc_stride, ahead);
  }
  if (padded == W) return multiply_values<R, 1, 2>(p, p_stride, run, begin, end, 0, acc, acc_stride, ahead);
  if constexpr (TWO_CHAINS == 2 * W) {
    if (padded == 2 * W) return multiply_values<R, 2, 2>(p, p_stride, run, begin, end, 0, acc, acc_stride, ahead);
  }
  values_across<R, ACROSS<R>>(p, p_stride, run, begin, end, 0, padded, acc, acc_stride, ahead);
}

// Scores s[j], j relative to a multiple of W, of keys first .. last -> exp(score - largest), zeros around up to ``width``.
// Returns the sum; ``peak``: the largest score.
float softmax(float* s, i64 first, i64 last, i64 width, const Rule& rule, float& peak) {
  const i64 begin = first / W * W, end = last / W * W + W;
  const vf none = set1(-INFINITY);
  const vi lane = lanes();
  vf top = none;
  for (i64 at = begin; at < end; at += W) {
    vf x = load(s + at) * rule.scale;
    if (rule.softcap > 0) x = rule.softcap * tanh(x / rule.softcap);
    if (at < first) x = lane >= (int32_t)(first - at) ? x : none;
    if (at + W > last) x = lane <= (int32_t)(last - at) ? x : none;
    store(s + at, x);
    top = max(top, x);
  }
  peak = largest(top);
  vf total = {};
  for (i64 at = begin; at < end; at += W) {
    vf p = exp(load(s + at) - peak);
    store(s + at, p);
    total += p;
  }
  for (i64 at = 0; at < begin; at += W) store(s + at, vf{});
  for (i64 at = end; at < width; at += W) store(s + at, vf{});
  return sum(total);
}

// All queries of one head group in ``count`` tokens from position ``start`` on. q, out: at the first token, group by group heads.
// ``runs(number)``: the run of the keys number * size .. ``lse`` (or null): [count][lse_stride], scores' log-sum-exp. ``after``:
// the runs of the next call, to be fetched while a few queries read the values.
template <class T, class Runs, class Q>
void attend(const Q* q, i64 q_stride, i64 start, i64 count, const Runs& runs, const Runs* after, i64 size, const Rule& rule, Q* out,
            i64 out_stride, float* lse, i64 lse_stride) {
  const i64 dim = rule.dim, padded = rule.padded(), chains = rule.chains(), acc_stride = padded * chains;
  const i64 s_stride = (start + count + 8 * W) / W * W;
  float* s = scratch(1, ROWS * (s_stride + dim + acc_stride) + 2 * W);
  float *wide = s + ROWS * s_stride, *acc = wide + ROWS * dim;
  for (i64 row = 0; row < count * rule.group; row += ROWS) {
    const int rows = (int)(count * rule.group - row < ROWS ? count * rule.group - row : ROWS);
    const i64 first = rule.first_key(start + row / rule.group), last = start + (row + rows - 1) / rule.group;
    const bool few = count * rule.group <= ROWS;
    const i64 base = first / W * W;  // s[0] is this key; runs may write up to W scores before it
    float* at_base = s + W;
    for (int r = 0; r < rows; r++) {
      const Q* from = q + (row + r) / rule.group * q_stride + (row + r) % rule.group * dim;
      for (i64 d = 0; d < dim; d++) wide[r * dim + d] = widen(from[d]);
    }
    i64 key = first;
    for (i64 number = first / size; key <= last; number++) {
      const Run<T> run = runs(number);
      const i64 end = last + 1 - run.first < run.count ? last + 1 - run.first : run.count;
      const Ahead ahead = {few ? (const char*)run.v - (const char*)run.k : 0};
      scores<ROWS>(rows, wide, dim, dim, run, (key - run.first) / W * W, end, at_base + run.first - base, s_stride, ahead);
      key = run.first + end;
    }
    float inverse[ROWS];
    for (int r = 0; r < rows; r++) {
      const i64 position = start + (row + r) / rule.group;
      float peak, total = softmax(at_base + r * s_stride, rule.first_key(position) - base, position - base, last - base + 1, rule, peak);
      if (rule.sinks) total += expf(rule.sinks[(row + r) % rule.group] - peak);
      inverse[r] = 1.0f / total;
      if (lse) lse[(row + r) / rule.group * lse_stride + (row + r) % rule.group] = peak + logf(total);
    }
    memset(acc, 0, rows * acc_stride * 4);
    key = first;
    for (i64 number = first / size; key <= last; number++) {
      const Run<T> run = runs(number);
      const i64 end = last + 1 - run.first < run.count ? last + 1 - run.first : run.count;
      const Ahead ahead = {few && after ? (const char*)(*after)(number).k - (const char*)run.v : 0};
      values<ROWS>(rows, at_base + run.first - base, s_stride, run, key - run.first, end, padded, acc, acc_stride, ahead);
      key = run.first + end;
    }
    for (int r = 0; r < rows; r++) {
      Q* to = out + (row + r) / rule.group * out_stride + (row + r) % rule.group * dim;
      for (i64 d = 0; d < dim; d += W) {
        const float* sums = acc + r * acc_stride + d * chains;
        vf x = chains == 2 ? load(sums) + load(sums + W) : load(sums);
        store_upto(to + d, x * inverse[r], dim - d);
      }
    }
  }
}

// Rows [count][dim] at a stride -> fp32 [dim][width], the transpose
template <class Q> void transposed(const Q* from, i64 stride, i64 count, i64 dim, float* to, i64 width) {
  for (i64 at = 0; at < width; at += W)
    for (i64 d = 0; d < dim; d += W) {
      vf block[W];
      load_columns(from + at * stride + d, stride, count - at, dim - d, block);
      for (int i = 0; i < W && d + i < dim; i++) store(to + (d + i) * width + at, block[i]);
    }
}

template <class Q> void widen_rows(const Q* from, i64 stride, i64 count, const Rule& rule, float* to) {
  for (i64 i = 0; i < count; i++)
    for (i64 d = 0; d < rule.padded(); d += W) store(to + i * rule.padded() + d, load_upto(from + i * stride + d, rule.dim - d));
}

struct Strides {
  i64 q, k, v;  // elements from token to token
};

template <class Q>
void packed(const Q* q, const Q* k, const Q* v, Strides stride, i64 kv_heads, const i64* bounds, i64 sequences, const Rule& rule,
            Q* out, float* lse, int threads) {
  const i64 heads = kv_heads * rule.group, padded = rule.padded(), pieces = sequences * kv_heads;
  in_team(num_threads(threads, pieces), pieces, 1, [&](i64 piece) {
    const i64 head = piece % kv_heads, token = bounds[piece / kv_heads], count = bounds[piece / kv_heads + 1] - token;
    const i64 width = (count + W - 1) / W * W;
    float *keys = scratch(2, rule.dim * width), *vals = scratch(3, count * padded);
    transposed(k + token * stride.k + head * rule.dim, stride.k, count, rule.dim, keys, width);
    widen_rows(v + token * stride.v + head * rule.dim, stride.v, count, rule, vals);
    Run<float> all = {keys, vals, width, padded, 0, count};
    auto runs = [&](i64) { return all; };
    attend<float>(q + token * stride.q + head * rule.group * rule.dim, stride.q, 0, count, runs, (decltype(&runs))nullptr, width + 1,
                  rule.of_head(head), out + (token * heads + head * rule.group) * rule.dim, heads * rule.dim,
                  lse ? lse + token * heads + head * rule.group : nullptr, heads);
 });
}

// gradients[K][V] += weights[row][key] rows[row] over all rows: K neighbouring keys, V vectors of head_dim
template <int K, int V>
void sum_over_rows(int keys, const float* weights, i64 w_stride, const float* rows, i64 row_stride, i64 count, float* gradients) {
  if constexpr (K > 1) {
    if (keys < K) return sum_over_rows<K - 1, V>(keys, weights, w_stride, rows, row_stride, count, gradients);
  }
  vf acc[K][V];
  for (int j = 0; j < K; j++)
    for (int v = 0; v < V; v++) acc[j][v] = load(gradients + j * row_stride + v * W);
  for (i64 r = 0; r < count; r++) {
    vf row[V];
    for (int v = 0; v < V; v++) row[v] = load(rows + r * row_stride + v * W);
    for (int j = 0; j < K; j++) {
      vf one = set1(weights[r * w_stride + j]);
      for (int v = 0; v < V; v++) acc[j][v] = fma(one, row[v], acc[j][v]);
    }
  }
  for (int j = 0; j < K; j++)
    for (int v = 0; v < V; v++) store(gradients + j * row_stride + v * W, acc[j][v]);
}

void sum_over_rows(i64 keys, const float* weights, i64 w_stride, const float* rows, i64 padded, i64 count, float* gradients) {
  constexpr int SOME = REGISTERS == 32 ? 12 : 6;
  for (i64 key = 0; key < keys; key += SOME) {
    const int some = (int)(keys - key < SOME ? keys - key : SOME);
    i64 d = 0;
    for (; d + 2 * W <= padded; d += 2 * W)
      sum_over_rows<SOME, 2>(some, weights + key, w_stride, rows + d, padded, count, gradients + key * padded + d);
    for (; d < padded; d += W)
      sum_over_rows<SOME, 1>(some, weights + key, w_stride, rows + d, padded, count, gradients + key * padded + d);
  }
}

// Scores s and gradients of probabilities g of keys 0 .. width - 1 -> probabilities and gradients of the scores before scaling.
void softmax_backward(float* s, float* g, i64 first, i64 last, i64 width, const Rule& rule, float lse, float delta) {
  const vi lane = lanes();
  for (i64 at = 0; at < width; at += W) {
    vf x = load(s + at) * rule.scale, slope = set1(rule.scale);
    if (rule.softcap > 0) {
      vf t = tanh(x / rule.softcap);
      x = rule.softcap * t;
      slope = slope * (1.0f - t * t);
    }
    vi seen = (lane >= (int32_t)(first - at)) & (lane <= (int32_t)(last - at));
    vf p = seen ? exp(x - lse) : vf{};
    store(s + at, p);
    store(g + at, seen ? p * (load(g + at) - delta) * slope : vf{});
  }
}

constexpr i64 TILE = 48;  // query rows whose probabilities are kept before keys and values get their gradients

// Gradients of one sequence and KV head. Pointers are at its first token and head; ``wide_stride``: of out, grad and grad_q.
template <class Q>
void backward(const Q* q, const Q* k, const Q* v, Strides stride, i64 count, const Rule& rule, const Q* out, const Q* grad,
              const float* lse, i64 heads, i64 kv_heads, Q* grad_q, Q* grad_k, Q* grad_v) {
  const i64 dim = rule.dim, padded = rule.padded(), width = (count + W - 1) / W * W, group = rule.group, wide = heads * dim;
  const i64 acc_stride = padded * rule.chains(), s_stride = width + 4 * W;
  float* keys = scratch(2, 2 * dim * width + 3 * width * padded);
  float *vals = keys + dim * width, *rows_k = vals + dim * width, *sum_k = rows_k + width * padded, *sum_v = sum_k + width * padded;
  float* s = scratch(1, TILE * (2 * s_stride + 2 * padded + 2) + ROWS * acc_stride);
  float *g = s + TILE * s_stride, *tile_q = g + TILE * s_stride, *tile_g = tile_q + TILE * padded, *acc = tile_g + TILE * padded;
  transposed(k, stride.k, count, dim, keys, width);
  transposed(v, stride.v, count, dim, vals, width);
  widen_rows(k, stride.k, count, rule, rows_k);
  memset(sum_k, 0, 2 * width * padded * 4);
  for (i64 tile = 0; tile < count * group; tile += TILE) {
    const i64 tile_rows = count * group - tile < TILE ? count * group - tile : TILE;
    const i64 base = rule.first_key(tile / group) / W * W, last = (tile + tile_rows - 1) / group, span = (last - base) / W * W + W;
    const Run<float> by_key = {keys + base, rows_k + base * padded, width, padded, base, span};
    const Run<float> by_value = {vals + base, nullptr, width, 0, base, span};
    for (i64 r = 0; r < tile_rows; r++) {
      const i64 token = (tile + r) / group, head = (tile + r) % group;
      widen_rows(q + token * stride.q + head * dim, 0, 1, rule, tile_q + r * padded);
      widen_rows(grad + token * wide + head * dim, 0, 1, rule, tile_g + r * padded);
    }
    for (i64 at = 0; at < tile_rows; at += ROWS) {
      const int rows = (int)(tile_rows - at < ROWS ? tile_rows - at : ROWS);
      scores<ROWS>(rows, tile_q + at * padded, padded, dim, by_key, 0, span, s + at * s_stride, s_stride);
      scores<ROWS>(rows, tile_g + at * padded, padded, dim, by_value, 0, span, g + at * s_stride, s_stride);
      for (i64 r = at; r < at + rows; r++) {
        const i64 token = (tile + r) / group, head = (tile + r) % group;
        vf delta = {};
        for (i64 d = 0; d < dim; d += W)
          delta = fma(load_upto(out + token * wide + head * dim + d, dim - d), load(tile_g + r * padded + d), delta);
        softmax_backward(s + r * s_stride, g + r * s_stride, rule.first_key(token) - base, token - base, span, rule,
                         lse[token * heads + head], sum(delta));
      }
      memset(acc, 0, rows * acc_stride * 4);
      values<ROWS>(rows, g + at * s_stride, s_stride, by_key, 0, last - base + 1, padded, acc, acc_stride);
      for (i64 r = at; r < at + rows; r++)
        for (i64 d = 0; d < dim; d += W) {
          const float* sums = acc + (r - at) * acc_stride + d * (acc_stride / padded);
          vf x = acc_stride == padded ? load(sums) : load(sums) + load(sums + W);
          store_upto(grad_q + (tile + r) / group * wide + (tile + r) % group * dim + d, x, dim - d);
        }
    }
    sum_over_rows(last - base + 1, g, s_stride, tile_q, padded, tile_rows, sum_k + base * padded);
    sum_over_rows(last - base + 1, s, s_stride, tile_g, padded, tile_rows, sum_v + base * padded);
  }
  for (i64 i = 0; i < count; i++)
    for (i64 d = 0; d < dim; d += W) {
      store_upto(grad_k + i * kv_heads * dim + d, load(sum_k + i * padded + d), dim - d);
      store_upto(grad_v + i * kv_heads * dim + d, load(sum_v + i * padded + d), dim - d);
    }
}

template <class Q>
void packed_backward(const Q* q, const Q* k, const Q* v, Strides stride, i64 kv_heads, const i64* bounds, i64 sequences,
                     const Rule& rule, const Q* out, const Q* grad, const float* lse, Q* grad_q, Q* grad_k, Q* grad_v, int threads) {
  const i64 heads = kv_heads * rule.group, pieces = sequences * kv_heads;
  in_team(num_threads(threads, pieces), pieces, 1, [&](i64 piece) {
    const i64 head = piece % kv_heads, token = bounds[piece / kv_heads], count = bounds[piece / kv_heads + 1] - token;
    const i64 first = head * rule.group, at = (token * heads + first) * rule.dim, at_kv = (token * kv_heads + head) * rule.dim;
    backward(q + token * stride.q + first * rule.dim, k + token * stride.k + head * rule.dim, v + token * stride.v + head * rule.dim,
             stride, count, rule, out + at, grad + at, lse + token * heads + first, heads, kv_heads, grad_q + at, grad_k + at_kv,
             grad_v + at_kv);
 });
}

struct Item {
  i64 token, start, count, pages;  // tokens of the step, position of the first, how many, where in the page table
};

template <class Q>
void paged(const Q* q, const Q* k, const Q* v, Strides stride, i64 kv_heads, const Item* items, i64 num_items, const int32_t* table,
           Q* cache, i64 num_pages, i64 page_size, i64 page_elements, const Rule& rule, Q* out, int threads) {
  const i64 heads = kv_heads * rule.group, dim = rule.dim, padded = rule.padded(), slots = (page_size + W - 1) / W * W;
  const i64 pieces = num_items * kv_heads;
  struct Pages {  // of one row and head
    Q *keys, *vals;
    const int32_t* numbers;
    i64 last, slots, padded, size, elements;
    Run<Q> operator()(i64 number) const {
      const i64 page = numbers[number < last ? number : last] * elements;
      return {keys + page, vals + page, slots, padded, number * size, size};
    }
  };
  auto pages_of = [&](i64 piece) {
    const Item& item = items[piece / kv_heads];
    Q *keys = cache + piece % kv_heads * num_pages * page_elements, *vals = keys + kv_heads * num_pages * page_elements;
    return Pages{keys, vals, table + item.pages, (item.start + item.count - 1) / page_size, slots, padded, page_size, page_elements};
  };
  const int team = num_threads(threads, (pieces + 15) / 16);
  in_team(team, pieces, 8, [&](i64 piece) {
    const Item& item = items[piece / kv_heads];
    const i64 head = piece % kv_heads, next = piece + 1 < pieces ? piece + 1 : piece;
    const Pages pages = pages_of(piece), after = pages_of(next);
    const Item& later = items[next / kv_heads];
    const Q* writes = after(after.last).k + (later.start + later.count - 1) % page_size;
    for (i64 d = 0; d < dim; d++) __builtin_prefetch(writes + d * slots, 1, 2);
    i64 number = item.start / page_size, slot = item.start % page_size;
    for (i64 i = 0; i < item.count; i++) {
      const i64 page = pages.numbers[number] * page_elements;
      const Q* from = k + (item.token + i) * stride.k + head * dim;
      for (i64 d = 0; d < dim; d++) pages.keys[page + d * slots + slot] = from[d];
      memcpy(pages.vals + page + slot * padded, v + (item.token + i) * stride.v + head * dim, dim * sizeof(Q));
      if (++slot == page_size) number++, slot = 0;
    }
    attend<Q>(q + item.token * stride.q + head * rule.group * dim, stride.q, item.start, item.count, pages, &after, page_size,
              rule.of_head(head), out + (item.token * heads + head * rule.group) * dim, heads * dim, nullptr, 0);
 });
}

}  // namespace

extern "C" {

// q [T, kv_heads * group, dim], k and v [T, kv_heads, dim] (heads contiguous, tokens at strides) -> out, contiguous, and lse
// [T, heads] where not null, with the sinks [heads], where there are any. bounds [sequences + 1]: where each sequence begins and ends. half: bf16 instead of fp32.
void attend_packed(int half, const void* q, i64 q_stride, const void* k, i64 k_stride, const void* v, i64 v_stride, i64 kv_heads,
                   i64 group, i64 dim, const i64* bounds, i64 sequences, float scale, float softcap, i64 window, const float* sinks,
                   void* out, float* lse, int threads) {
  const Rule rule = {dim, group, scale, softcap, window, sinks};
  const Strides s = {q_stride, k_stride, v_stride};
  if (half)
    packed((const bf16*)q, (const bf16*)k, (const bf16*)v, s, kv_heads, bounds, sequences, rule, (bf16*)out, lse, threads);
  else packed((const float*)q, (const float*)k, (const float*)v, s, kv_heads, bounds, sequences, rule, (float*)out, lse, threads);
}

// Gradients of attend_packed from its inputs, out, lse and the gradient of out; all but q, k and v contiguous.
void attend_packed_backward(int half, const void* q, i64 q_stride, const void* k, i64 k_stride, const void* v, i64 v_stride,
                            i64 kv_heads, i64 group, i64 dim, const i64* bounds, i64 sequences, float scale, float softcap,
                            i64 window, const void* out, const void* grad, const float* lse, void* grad_q, void* grad_k, void* grad_v,
                            int threads) {
  const Rule rule = {dim, group, scale, softcap, window};
  const Strides s = {q_stride, k_stride, v_stride};
  if (half)
    packed_backward((const bf16*)q, (const bf16*)k, (const bf16*)v, s, kv_heads, bounds, sequences, rule, (const bf16*)out,
                    (const bf16*)grad, lse, (bf16*)grad_q, (bf16*)grad_k, (bf16*)grad_v, threads);
  else
    packed_backward((const float*)q, (const float*)k, (const float*)v, s, kv_heads, bounds, sequences, rule, (const float*)out,
                    (const float*)grad, lse, (float*)grad_q, (float*)grad_k, (float*)grad_v, threads);
}

// Writes k and v of each item's tokens into the pages of its row, then attends over them. cache: [2, kv_heads, num_pages,
// page_elements] of one layer; keys of a page [dim][page_size rounded up to W], values [page_size][dim rounded up to W],
// whose padding must be finite. items [num_items][4], see Item; the rows of one call must be different.
void attend_paged(int half, const void* q, i64 q_stride, const void* k, i64 k_stride, const void* v, i64 v_stride, i64 kv_heads,
                  i64 group, i64 dim, const i64* items, i64 num_items, const int32_t* table, void* cache, i64 num_pages,
                  i64 page_size, i64 page_elements, float scale, float softcap, i64 window, const float* sinks, void* out,
                  int threads) {
  const Rule rule = {dim, group, scale, softcap, window, sinks};
  const Strides s = {q_stride, k_stride, v_stride};
  if (half)
    paged((const bf16*)q, (const bf16*)k, (const bf16*)v, s, kv_heads, (const Item*)items, num_items, table, (bf16*)cache, num_pages,
          page_size, page_elements, rule, (bf16*)out, threads);
  else
    paged((const float*)q, (const float*)k, (const float*)v, s, kv_heads, (const Item*)items, num_items, table, (float*)cache,
          num_pages, page_size, page_elements, rule, (float*)out, threads);
}
}
