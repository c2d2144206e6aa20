// Matrix products in the style of CUTLASS 2: asynchronous copies in several stages, mma of warps. They run on every device
// from compute capability 8.0 on.
#pragma once

#include "cutlass/gemm/device/gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"

#include "epilogue.cuh"
#include "problem.cuh"

namespace raftune {

template <
    class Element, class LayoutA, int AlignA, class LayoutB, int AlignB, int AlignOut, class Class, class Math,
    class Block, class Warp, class Instruction, int Stages, class Swizzle, class Op, Source kSource>
struct GemmSm80 {
  using RowMajor = cutlass::layout::RowMajor;
  using Epilogue = Output<Element, AlignOut, Op, kSource>;
  using Device = cutlass::gemm::device::GemmUniversal<
      Element, LayoutA, Element, LayoutB, Element, RowMajor, float, Class, cutlass::arch::Sm80, Block, Warp, Instruction,
      Epilogue, Swizzle, Stages, AlignA, AlignB, Math>;
  using Kernel = typename Device::GemmKernel;
  static constexpr bool kStreams = cutlass::platform::is_same<Swizzle, cutlass::gemm::threadblock::ThreadblockSwizzleStreamK>::value;

  static typename Device::Arguments arguments(Gemm const& p) {
    bool const batched = p.batch > 1;
    auto const mode = batched ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm;
    int const count = int(batched ? p.batch : p.splits);
    cutlass::gemm::GemmCoord const shape{int(p.m), int(p.n), int(p.k)};
    typename Epilogue::Params const epilogue{p.alpha, p.beta};
    // Without a source the kernel reads none, but it computes addresses.
    void const* source = p.source == nullptr ? p.out : p.source;
    if constexpr (kStreams) {
      return {mode,      shape,     count,          epilogue,    p.a,   p.b,   source, p.out, p.batch_a,
              p.batch_b, p.batch_source, p.batch_out, p.lda, p.ldb, p.lds,  p.ldo, p.processors};
    } else {
      return {mode,      shape,          count,       epilogue, p.a,   p.b,   source, p.out,
              p.batch_a, p.batch_b, p.batch_source, p.batch_out, p.lda, p.ldb, p.lds, p.ldo};
    }
  }

  // The kernel looks at the sizes only; here at what lies between rows and matrices as well. Needs no device.
  static cutlass::Status can_implement(Gemm const& p) {
    if (p.m < 1 || p.n < 1 || p.k < 1 || p.batch < 1 || p.splits < 1 || (p.batch > 1 && p.splits > 1)) {
      return cutlass::Status::kErrorInvalidProblem;
    }
    bool const aligned = p.lda % AlignA == 0 && p.batch_a % AlignA == 0 && p.ldb % AlignB == 0 && p.batch_b % AlignB == 0 &&
                         p.lds % AlignOut == 0 && p.batch_source % AlignOut == 0 && p.ldo % AlignOut == 0 &&
                         p.batch_out % AlignOut == 0;
    return aligned ? Kernel::can_implement(arguments(p)) : cutlass::Status::kErrorMisalignedOperand;
  }

  static size_t workspace(Gemm const& p) { return Device::get_workspace_size(arguments(p)); }

  static cutlass::Status run(Gemm const& p, void* workspace, cudaStream_t stream) {
    Device device;
    return device(arguments(p), workspace, stream);
  }
};

}  // namespace raftune
