// exp, threads and work space, for the kernels of this package.
//
// Every function here and in the sources does the same operations in the same order for an element whatever is computed beside
// it: that is what makes generation bit-equal to training.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <time.h>
#include "vectors.h"

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
  static thread_local Buffer buffers[8];
  Buffer& buffer = buffers[which];
  if (buffer.size < floats) {
    free(buffer.data);
    buffer.size = floats + floats / 4 + 1024;
    buffer.data = (float*)aligned_alloc(64, (buffer.size * 4 + 63) / 64 * 64);
  }
  return buffer.data;
}
