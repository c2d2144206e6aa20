// What a caller says about one call; the Python side mirrors these structs field by field (library.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cutlass/cutlass.h"

namespace raftune {

// out = op(alpha * a @ b, beta * source). Leading dimensions and batch strides count elements; `splits` is the number of
// slices of k, or 1; `processors` counts the multiprocessors of the device.
struct Gemm {
  int64_t m, n, k, batch;
  void const* a;
  void const* b;
  void const* source;
  void* out;
  int64_t lda, ldb, lds, ldo;
  int64_t batch_a, batch_b, batch_source, batch_out;
  float alpha, beta;
  int32_t splits, processors;
};

// A convolution over N, H, W with C channels in and K out, in channels-last order. What `a`, `b` and `out` are depends on
// the pass: image, filter, result; gradient of the result, filter, gradient of the image; gradient of the result, image,
// gradient of the filter. `source` is one value per channel of the result, or null.
struct Convolution {
  int32_t n, h, w, c, k, r, s, p, q;
  int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  int32_t splits;
  void const* a;
  void const* b;
  void const* source;
  void* out;
  float alpha, beta;
};

// Of the error codes of a run, those of the CUDA runtime start here; the ones below are cutlass::Status.
int const kRuntimeError = 1000;

inline int code_of(cutlass::Status status) {
  if (status != cutlass::Status::kSuccess) {
    return int(status);
  }
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? 0 : kRuntimeError + int(error);
}

}  // namespace raftune

#define RAFTUNE_EXPORT(NAME, KERNEL, PROBLEM, SPEC)                                                                   \
  extern "C" char const* NAME##_spec() { return SPEC; }                                                              \
  extern "C" int NAME##_can_implement(raftune::PROBLEM const* problem) {                                             \
    return int(KERNEL::can_implement(*problem));                                                                     \
  }                                                                                                                  \
  extern "C" size_t NAME##_workspace(raftune::PROBLEM const* problem) { return KERNEL::workspace(*problem); }        \
  extern "C" int NAME##_run(raftune::PROBLEM const* problem, void* workspace, void* stream) {                        \
    return raftune::code_of(KERNEL::run(*problem, workspace, static_cast<cudaStream_t>(stream)));                    \
  }
