// The functions that the sources share, each described where it is defined.
#pragma once
#include "common.h"

extern "C" {
void linear_forward(int kind, const void* x, i64 ldx, i64 m, const void* w, i64 n, i64 k, const float* bias, void* out, int threads);
void rms_norm(int half, const void* x, i64 outer, i64 stride, i64 inner, i64 n, const void* weight, int unit_offset, float eps,
              void* out, i64 out_stride, float* scales);
void rotate(int half, const void* x, i64 tokens, i64 stride, i64 heads, i64 dim, i64 pairs, const void* cos, const void* sin,
            int interleaved, void* out, i64 out_stride);
void gated_linear(int half, const void* gate_up, i64 rows, i64 n, int gelu, void* out);
void attend_packed(int half, const void* q, i64 q_stride, const void* k, i64 k_stride, const void* v, i64 v_stride, i64 kv_heads,
                   i64 group, i64 dim, const i64* bounds, i64 sequences, float scale, float softcap, i64 window, const float* sinks,
                   void* out, float* lse, int threads);
void attend_paged(int half, const void* q, i64 q_stride, const void* k, i64 k_stride, const void* v, i64 v_stride, i64 kv_heads,
                  i64 group, i64 dim, const i64* items, i64 num_items, const int32_t* table, void* cache, i64 num_pages,
                  i64 page_size, i64 page_elements, float scale, float softcap, i64 window, const float* sinks, void* out,
                  int threads);
}
