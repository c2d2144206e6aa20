// What is done to the accumulators on the way out, in float: op(alpha * accumulator + beta * source) forward, and
// op(alpha * accumulator, source) backward, where the source is the activation's input (or its result) and the accumulator
// the gradient. The same functions serve the kernels of both generations.
#pragma once

#include "cutlass/array.h"
#include "cutlass/fast_math.h"
#include "cutlass/numeric_conversion.h"

namespace raftune {

enum class Source { kNone, kRow, kMatrix };

namespace op {

struct Forward {
  static constexpr bool kBackward = false;
};

struct Backward {
  static constexpr bool kBackward = true;
};

CUTLASS_HOST_DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Identity : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) { return x; }
};

// A NaN stays one, as in PyTorch.
struct Relu : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) { return x < 0.0f ? 0.0f : x; }
};

struct Gelu : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
};

struct GeluTanh : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
};

struct Silu : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) { return x * logistic(x); }
};

struct Tanh : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) { return tanhf(x); }
};

struct Sigmoid : Forward {
  CUTLASS_HOST_DEVICE static float apply(float x) { return logistic(x); }
};

// z is the result (or the input) of the ReLU.
struct ReluBackward : Backward {
  CUTLASS_HOST_DEVICE static float apply(float gradient, float z) { return z <= 0.0f ? 0.0f : gradient; }
};

struct GeluBackward : Backward {
  CUTLASS_HOST_DEVICE static float apply(float gradient, float z) {
    float const normal = 0.5f * (1.0f + erff(z * 0.70710678118654752f));
    float const density = 0.39894228040143268f * expf(-0.5f * z * z);
    return gradient * (normal + z * density);
  }
};

struct GeluTanhBackward : Backward {
  CUTLASS_HOST_DEVICE static float apply(float gradient, float z) {
    float const t = tanhf(0.79788456080286536f * (z + 0.044715f * z * z * z));
    float const inner = 0.79788456080286536f * (1.0f + 3.0f * 0.044715f * z * z);
    return gradient * (0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * inner);
  }
};

struct SiluBackward : Backward {
  CUTLASS_HOST_DEVICE static float apply(float gradient, float z) {
    float const s = logistic(z);
    return gradient * s * (1.0f + z * (1.0f - s));
  }
};

// y is the result of the tanh, or of the logistic function.
struct TanhBackward : Backward {
  CUTLASS_HOST_DEVICE static float apply(float gradient, float y) { return gradient * (1.0f - y * y); }
};

struct SigmoidBackward : Backward {
  CUTLASS_HOST_DEVICE static float apply(float gradient, float y) { return gradient * (1.0f - y) * y; }
};

}  // namespace op

// The output operator of kernels in the style of CUTLASS 2: see cutlass/epilogue/thread/linear_combination.h for what is
// asked of one. A kernel that splits k in series calls it once for each slice, with what the slices before have left as
// source; the activation is applied to the last.
template <class Element, int Count, class Op, Source kSource>
class Output {
 public:
  using ElementOutput = Element;
  using ElementSource = Element;
  using ElementAccumulator = float;
  using ElementCompute = float;
  using ElementC = Element;
  using ElementD = Element;

  static int const kCount = Count;
  static bool const kIsHeavy = true;

  using FragmentOutput = cutlass::Array<Element, Count>;
  using FragmentSource = cutlass::Array<Element, Count>;
  using FragmentAccumulator = cutlass::Array<float, Count>;
  using FragmentCompute = cutlass::Array<float, Count>;

  struct Params {
    float alpha = 1.0f;
    float beta = 0.0f;
  };

  CUTLASS_HOST_DEVICE
  Output(Params const& params) : alpha_(params.alpha), beta_(params.beta) {}

  CUTLASS_HOST_DEVICE
  bool is_source_needed() const { return kSource != Source::kNone || partial_; }

  CUTLASS_HOST_DEVICE
  void set_k_partition(int slice, int slices) {
    partial_ = slice > 0;
    last_ = slice == slices - 1;
    if (partial_) {
      beta_ = 1.0f;
    }
  }

  CUTLASS_DEVICE
  FragmentOutput operator()(FragmentAccumulator const& accumulator, FragmentSource const& source) const {
    cutlass::NumericArrayConverter<float, Element, Count> widen;
    cutlass::NumericArrayConverter<Element, float, Count> narrow;
    FragmentCompute const other = widen(source);
    FragmentCompute result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) {
      if constexpr (Op::kBackward) {
        result[i] = Op::apply(alpha_ * accumulator[i], other[i]);
      } else {
        float const sum = alpha_ * accumulator[i] + beta_ * other[i];
        result[i] = last_ ? Op::apply(sum) : sum;
      }
    }
    return narrow(result);
  }

  CUTLASS_DEVICE
  FragmentOutput operator()(FragmentAccumulator const& accumulator) const {
    cutlass::NumericArrayConverter<Element, float, Count> narrow;
    FragmentCompute result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) {
      float const scaled = alpha_ * accumulator[i];
      if constexpr (Op::kBackward) {
        result[i] = scaled;
      } else {
        result[i] = last_ ? Op::apply(scaled) : scaled;
      }
    }
    return narrow(result);
  }

 private:
  float alpha_;
  float beta_;
  bool partial_ = false;
  bool last_ = true;
};

// The same functions for a visitor tree, whose nodes take and return whole fragments.
template <class Op>
struct Lift {
  template <class Fragment>
  struct Fn {
    CUTLASS_DEVICE
    Fragment operator()(Fragment const& x) const {
      Fragment result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Fragment::kElements; ++i) {
        result[i] = Op::apply(x[i]);
      }
      return result;
    }

    CUTLASS_DEVICE
    Fragment operator()(Fragment const& gradient, Fragment const& z) const {
      Fragment result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Fragment::kElements; ++i) {
        result[i] = Op::apply(gradient[i], z[i]);
      }
      return result;
    }
  };
};

}  // namespace raftune
