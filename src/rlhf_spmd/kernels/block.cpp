// One transformer layer in one call, where no gradient is wanted and no other rank has a part of it: the same functions as one
// by one, hence the same bits. Rows go through the products some at a time, so that what lies between stays in the cache.
#include "kernels.h"

namespace {

struct Block {  // class _Block of cpp_ops.py has the same fields in the same order
  i64 half, rows, tokens, hidden, heads, kv_heads, dim, inner, unit_offset, gelu, window, threads, interleaved, norms_over_all_heads, pairs;
  const void *x, *cos, *sin;
  void *qkv, *mixed, *out;  // [rows, (heads + 2 kv_heads) dim], [rows, heads dim], [rows, hidden]
  const void *input_norm, *w_qkv, *q_norm, *k_norm, *w_out, *attention_norm, *post_norm, *w_gate_up, *w_down, *mlp_norm;
  const float *b_qkv, *b_gate_up;
  const i64* items;  // of attend_packed the bounds, where there is no cache
  i64 num_items;
  const int32_t* page_table;
  void* cache;
  i64 num_pages, page_size, page_elements;
  double eps, scale, softcap, residual;
};

constexpr i64 SOME = 64;

template <class T> struct Layer {
  const Block& b;
  const i64 heads = b.heads + 2 * b.kv_heads, width = heads * b.dim, mixed_width = b.heads * b.dim;

  T* row(void* matrix, i64 at, i64 columns) const { return (T*)matrix + at * columns; }
  const T* row(const void* matrix, i64 at, i64 columns) const { return (const T*)matrix + at * columns; }
  void norm(const T* x, i64 outer, i64 stride, i64 inner, i64 n, const void* weight, T* to, i64 to_stride) const {
    rms_norm((int)b.half, x, outer, stride, inner, n, weight, (int)b.unit_offset, (float)b.eps, to, to_stride, nullptr);
  }
  void product(const T* x, i64 m, const void* w, i64 n, i64 k, const float* bias, T* to, int threads) const {
    linear_forward((int)b.half, x, k, m, w, n, k, bias, to, threads);
  }
  // to = x + norm(added) * residual, where there is a norm
  void add(const T* x, T* added, const void* weight, i64 m, T* to) const {
    if (weight) norm(added, m, b.hidden, 1, b.hidden, weight, added, b.hidden);
    for (i64 at = 0; b.residual != 1 && at < m * b.hidden; at += W) {
      const i64 n = m * b.hidden - at;
      store_upto(added + at, load_upto(added + at, n) * (float)b.residual, n);
    }
    for (i64 at = 0; at < m * b.hidden; at += W) {
      const i64 n = m * b.hidden - at;
      store_upto(to + at, load_upto(x + at, n) + load_upto(added + at, n), n);
    }
  }
  // the rows themselves, where there is no norm
  const T* normed(const T* x, const void* weight, i64 m) const {
    if (!weight) return x;
    T* to = (T*)scratch(4, m * b.hidden);
    norm(x, m, b.hidden, 1, b.hidden, weight, to, b.hidden);
    return to;
  }
  // rows in -> q, k (normed and rotated) and v
  void enter(i64 at, i64 m, int threads) const {
    T* qkv = row(b.qkv, at, width);
    product(normed(row(b.x, at, b.hidden), b.input_norm, m), m, b.w_qkv, width, b.hidden, b.b_qkv, qkv, threads);
    const i64 q_norms = b.norms_over_all_heads ? 1 : b.heads, k_norms = b.norms_over_all_heads ? 1 : b.kv_heads, kv_width = b.kv_heads * b.dim;
    if (b.q_norm) norm(qkv, m, width, q_norms, mixed_width / q_norms, b.q_norm, qkv, width);
    if (b.k_norm) norm(qkv + mixed_width, m, width, k_norms, kv_width / k_norms, b.k_norm, qkv + mixed_width, width);
    const T *cos = row(b.cos, at, b.pairs), *sin = row(b.sin, at, b.pairs);
    rotate((int)b.half, qkv, m, width, b.heads + b.kv_heads, b.dim, b.pairs, cos, sin, (int)b.interleaved, qkv, width);
  }
  void attend() const {
    const T *q = (T*)b.qkv, *k = q + mixed_width, *v = k + b.kv_heads * b.dim;
    const i64 group = b.heads / b.kv_heads;
    memset(row(b.mixed, b.tokens, mixed_width), 0, (b.rows - b.tokens) * mixed_width * sizeof(T));
    const float scale = (float)b.scale, softcap = (float)b.softcap;
    if (b.cache)
      attend_paged((int)b.half, q, width, k, width, v, width, b.kv_heads, group, b.dim, b.items, b.num_items, b.page_table,
                   b.cache, b.num_pages, b.page_size, b.page_elements, scale, softcap, b.window, nullptr, b.mixed, (int)b.threads);
    else
      attend_packed((int)b.half, q, width, k, width, v, width, b.kv_heads, group, b.dim, b.items, b.num_items, scale, softcap,
                    b.window, nullptr, b.mixed, nullptr, (int)b.threads);
  }
  // the attention's output matrix and the gated MLP, each added to the rows
  void leave(i64 at, i64 m, int threads) const {
    T *added = (T*)scratch(4, m * b.hidden), *gate_up = (T*)scratch(5, m * 2 * b.inner), *active = (T*)scratch(6, m * b.inner);
    T* out = row(b.out, at, b.hidden);
    product(row(b.mixed, at, mixed_width), m, b.w_out, b.hidden, mixed_width, nullptr, added, threads);
    add(row(b.x, at, b.hidden), added, b.attention_norm, m, out);
    product(normed(out, b.post_norm, m), m, b.w_gate_up, 2 * b.inner, b.hidden, b.b_gate_up, gate_up, threads);
    gated_linear((int)b.half, gate_up, m, b.inner, (int)b.gelu, active);
    product(active, m, b.w_down, b.hidden, b.inner, nullptr, added, threads);
    add(out, added, b.mlp_norm, m, out);
  }
  template <class Part> void in_parts(Part part) const {
    const i64 parts = (b.rows + SOME - 1) / SOME;
    const bool many = parts >= 2 * b.threads;  // else the products share their outputs among the threads
    in_team(many ? (int)b.threads : 1, parts, 1, [&](i64 i) {
      part(i * SOME, b.rows - i * SOME < SOME ? b.rows - i * SOME : SOME, many ? 1 : (int)b.threads);
    });
  }
  void run() const {
    in_parts([this](i64 at, i64 m, int threads) { enter(at, m, threads); });
    attend();
    in_parts([this](i64 at, i64 m, int threads) { leave(at, m, threads); });
  }
};

}  // namespace

extern "C" void block_forward(const Block* block) {
  if (block->half) Layer<bf16>{*block}.run();
  else Layer<float>{*block}.run();
}
