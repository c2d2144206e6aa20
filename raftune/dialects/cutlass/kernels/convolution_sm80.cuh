// Convolutions as implicit matrix products, in channels-last order, in the style of CUTLASS 2.
#pragma once

// The device's header names what only the problem's declares.
#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"
#include "cutlass/conv/kernel/default_conv2d_dgrad.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "cutlass/conv/threadblock/threadblock_swizzle.h"

#include "epilogue.cuh"
#include "problem.cuh"

namespace raftune {

template <
    cutlass::conv::Operator kPass, class Element, int AlignA, int AlignB, int AlignOut, class Class, class Math, class Block,
    class Warp, class Instruction, int Stages, class Swizzle, cutlass::conv::IteratorAlgorithm kIterator,
    cutlass::conv::StrideSupport kStrides, class Op, Source kSource>
struct ConvolutionSm80 {
  using Layout = cutlass::layout::TensorNHWC;
  using Epilogue = Output<Element, AlignOut, Op, kSource>;

  template <cutlass::conv::Operator kWhich, class = void>
  struct Default;

  template <class Unused>
  struct Default<cutlass::conv::Operator::kFprop, Unused> {
    using Type = typename cutlass::conv::kernel::DefaultConv2dFprop<
        Element, Layout, Element, Layout, Element, Layout, float, Class, cutlass::arch::Sm80, Block, Warp, Instruction,
        Epilogue, Swizzle, Stages, Math, kIterator, kStrides, AlignA, AlignB>::Kernel;
  };

  template <class Unused>
  struct Default<cutlass::conv::Operator::kDgrad, Unused> {
    using Type = typename cutlass::conv::kernel::DefaultConv2dDgrad<
        Element, Layout, Element, Layout, Element, Layout, float, Class, cutlass::arch::Sm80, Block, Warp, Instruction,
        Epilogue, Swizzle, Stages, Math, kIterator, kStrides, AlignA, AlignB>::Kernel;
  };

  template <class Unused>
  struct Default<cutlass::conv::Operator::kWgrad, Unused> {
    using Type = typename cutlass::conv::kernel::DefaultConv2dWgrad<
        Element, Layout, Element, Layout, Element, Layout, float, Class, cutlass::arch::Sm80, Block, Warp, Instruction,
        Epilogue, Swizzle, Stages, Math, kIterator, kStrides, AlignA, AlignB>::Kernel;
  };

  using Device = cutlass::conv::device::ImplicitGemmConvolution<typename Default<kPass>::Type>;

  static typename Device::Arguments arguments(Convolution const& p) {
    cutlass::conv::Conv2dProblemSize const size(
        p.n, p.h, p.w, p.c, p.k, p.r, p.s, p.p, p.q, p.pad_h, p.pad_w, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w,
        cutlass::conv::Mode::kCrossCorrelation, p.splits);
    auto tensor = [](void const* data, Layout layout) {
      return cutlass::TensorRef<Element, Layout>(static_cast<Element*>(const_cast<void*>(data)), layout);
    };
    auto packed = [](int n, int h, int w, int c) { return Layout::packed({n, h, w, c}); };
    Layout const image = packed(p.n, p.h, p.w, p.c), filter = packed(p.k, p.r, p.s, p.c), result = packed(p.n, p.p, p.q, p.k);
    Layout const a = kPass == cutlass::conv::Operator::kFprop ? image : result;
    Layout const b = kPass == cutlass::conv::Operator::kWgrad ? image : filter;
    Layout const out = kPass == cutlass::conv::Operator::kFprop ? result : kPass == cutlass::conv::Operator::kDgrad ? image : filter;
    // One value per channel has no stride but the channel's. Without a source the kernel reads none.
    bool const row = kSource == Source::kRow;
    Layout const other = row ? Layout(typename Layout::Stride{}) : out;
    void const* source = row ? p.source : p.out;
    return {size, tensor(p.a, a), tensor(p.b, b), tensor(source, other), tensor(p.out, out), {p.alpha, p.beta},
            cutlass::conv::SplitKMode::kSerial};
  }

  // Needs no device.
  static cutlass::Status can_implement(Convolution const& p) {
    if (p.n < 1 || p.c < 1 || p.k < 1 || p.p < 1 || p.q < 1 || p.splits < 1) {
      return cutlass::Status::kErrorInvalidProblem;
    }
    return Device::can_implement(arguments(p));
  }

  static size_t workspace(Convolution const& p) { return Device::get_workspace_size(arguments(p)); }

  static cutlass::Status run(Convolution const& p, void* workspace, cudaStream_t stream) {
    Device device;
    return device(arguments(p), workspace, stream);
  }
};

}  // namespace raftune
