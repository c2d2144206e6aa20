// Matrix products in the style of CUTLASS 3 for compute capability 9.0: TMA, wgmma, specialised warps, persistent blocks.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "epilogue.cuh"
#include "problem.cuh"

namespace raftune {

// The visitor tree of an epilogue and its arguments.
template <class Element, class Block, class Op, Source kSource>
struct Fusion {
  using PerBatch = cute::Stride<cute::_0, cute::_0, int64_t>;
  template <template <class> class Fn, class To, class... Children>
  using Node = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<Fn, To, float, cutlass::FloatRoundStyle::round_to_nearest>, Children...>;
  using Scalar = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float, PerBatch>;
  using Accumulator = cutlass::epilogue::fusion::Sm90AccFetch;
  using Matrix = cutlass::epilogue::fusion::Sm90SrcFetch<Element>;
  using Row = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Block, Element, float, cute::Stride<cute::_0, cute::_1, int64_t>>;

  using Scaled = Node<cutlass::multiplies, float, Scalar, Accumulator>;
  using Other = cute::conditional_t<kSource == Source::kRow, Row, Matrix>;
  using Sum = Node<cutlass::homogeneous_multiply_add, float, Scalar, Other, Scaled>;

  template <bool kBackward, bool kWithSource, class = void>
  struct Tree;

  template <class Unused>
  struct Tree<true, true, Unused> {
    using Type = Node<Lift<Op>::template Fn, Element, Scaled, Matrix>;
    static typename Type::Arguments arguments(Gemm const& p) { return {scaled(p), {}, {}}; }
  };

  template <class Unused>
  struct Tree<false, false, Unused> {
    using Type = Node<Lift<Op>::template Fn, Element, Scaled>;
    static typename Type::Arguments arguments(Gemm const& p) { return {scaled(p), {}}; }
  };

  template <class Unused>
  struct Tree<false, true, Unused> {
    using Type = Node<Lift<Op>::template Fn, Element, Sum>;
    static typename Type::Arguments arguments(Gemm const& p) {
      return {{{{p.beta}, {}, {}}, other(p), scaled(p), {}}, {}};
    }
  };

  using Choice = Tree<Op::kBackward, kSource != Source::kNone>;
  using Type = typename Choice::Type;

  static typename Scaled::Arguments scaled(Gemm const& p) { return {{{p.alpha}, {}, {}}, {}, {}}; }

  static typename Other::Arguments other(Gemm const& p) {
    if constexpr (kSource == Source::kRow) {
      return {static_cast<Element const*>(p.source), Element(0), {cute::_0{}, cute::_1{}, p.batch_source}};
    } else {
      return {};
    }
  }

  static typename Type::Arguments arguments(Gemm const& p) { return Choice::arguments(p); }
};

template <
    class Element, class LayoutA, int AlignA, class LayoutB, int AlignB, int AlignOut, class Block, class Cluster,
    class MainloopSchedule, class EpilogueSchedule, class Scheduler, class Op, Source kSource>
struct GemmSm90 {
  using RowMajor = cutlass::layout::RowMajor;
  using Epilogue = Fusion<Element, Block, Op, kSource>;
  using ElementSource = cute::conditional_t<kSource == Source::kMatrix, Element, void>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Block, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
      float, float, ElementSource, RowMajor, AlignOut, Element, RowMajor, AlignOut, EpilogueSchedule,
      typename Epilogue::Type>::CollectiveOp;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, AlignA, Element, LayoutB, AlignB, float, Block,
      Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, Scheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // The stride that is not one, and the one between matrices.
  template <class Stride>
  static Stride strides(int64_t leading, int64_t batch) {
    Stride stride{};
    if constexpr (cute::is_static<cute::remove_cvref_t<decltype(cute::get<0>(Stride{}))>>::value) {
      cute::get<1>(stride) = leading;
    } else {
      cute::get<0>(stride) = leading;
    }
    cute::get<2>(stride) = batch;
    return stride;
  }

  static typename Device::Arguments arguments(Gemm const& p) {
    cutlass::KernelHardwareInfo hardware;
    hardware.sm_count = p.processors;
    using StrideC = typename Kernel::StrideC;
    using ElementC = typename Kernel::ElementC;
    auto const* source = kSource == Source::kMatrix ? static_cast<ElementC const*>(p.source) : nullptr;
    return {
        cutlass::gemm::GemmUniversalMode::kGemm,
        {int(p.m), int(p.n), int(p.k), int(p.batch)},
        {static_cast<Element const*>(p.a), strides<typename Kernel::StrideA>(p.lda, p.batch_a),
         static_cast<Element const*>(p.b), strides<typename Kernel::StrideB>(p.ldb, p.batch_b)},
        {Epilogue::arguments(p), source, strides<StrideC>(p.lds, p.batch_source), static_cast<Element*>(p.out),
         strides<typename Kernel::StrideD>(p.ldo, p.batch_out)},
        hardware};
  }

  // Needs no device.
  static cutlass::Status can_implement(Gemm const& p) {
    if (p.m < 1 || p.n < 1 || p.k < 1 || p.batch < 1 || p.splits != 1) {
      return cutlass::Status::kErrorInvalidProblem;
    }
    bool const aligned = p.lda % AlignA == 0 && p.batch_a % AlignA == 0 && p.ldb % AlignB == 0 && p.batch_b % AlignB == 0 &&
                         p.lds % AlignOut == 0 && p.batch_source % AlignOut == 0 && p.ldo % AlignOut == 0 &&
                         p.batch_out % AlignOut == 0;
    return aligned ? Device::can_implement(arguments(p)) : cutlass::Status::kErrorMisalignedOperand;
  }

  static size_t workspace(Gemm const& p) { return Device::get_workspace_size(arguments(p)); }

  static cutlass::Status run(Gemm const& p, void* workspace, cudaStream_t stream) {
    Device device;
    return device.run(arguments(p), workspace, stream);
  }
};

}  // namespace raftune
