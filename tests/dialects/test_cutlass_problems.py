"""Which regions CUTLASS's templates take, and what of them the kernel is told to fuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cutlass_workloads import convolution, convolution_backward, product

from raftune.dialects.base import BuildError, Unsupported
from raftune.dialects.cutlass import CutlassDialect
from raftune.dialects.cutlass.problem import ConvolutionProblem, GemmProblem, problem_of
from raftune.dialects.cutlass.schema import Sm80Gemm, Sm90Gemm, parse
from raftune.dialects.cutlass.spec import gemm_spec
from raftune.graph.fusion import propose
from raftune.graph.workloads import workload_from_call
from raftune.pattern import Declared
from raftune.workload import Workload

aten = torch.ops.aten
HALF = torch.float16


def t(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def region(function, *inputs) -> Workload:
    """The largest region that the dialect's patterns propose in ``function``."""
    module = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs)
    dialect = CutlassDialect()
    declared = [Declared(pattern, dialect.supports) for pattern in dialect.patterns()]
    found = propose(module.graph, declared, lambda workload: False)
    return max(found, key=lambda r: len(r.nodes)).workload


def gemm(workload: Workload) -> GemmProblem:
    problem = problem_of(workload)
    assert isinstance(problem, GemmProblem)
    return problem


X, W, B, R = t(48, 64), t(32, 64), t(32), t(48, 32)


@pytest.mark.parametrize(
    ("function", "inputs", "op", "source"),
    [
        (lambda x, w, b: F.linear(x, w, b).relu(), (X, W, B), "Relu", "row"),
        (lambda x, w, b: F.gelu(F.linear(x, w, b)), (X, W, B), "Gelu", "row"),
        (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), (X, W, B), "GeluTanh", "row"),
        (lambda x, w: F.silu(x @ w.t()), (X, W), "Silu", "none"),
        (lambda x, w, r: x @ w.t() + r, (X, W, R), "Identity", "matrix"),
        (lambda x, w, r: (x @ w.t() + r).tanh(), (X, W, R), "Tanh", "matrix"),
        (lambda g, w, z: aten.threshold_backward(g @ w.t(), z, 0), (X, W, R), "ReluBackward", "matrix"),
        (lambda g, w, z: aten.gelu_backward(g @ w.t(), z), (X, W, R), "GeluBackward", "matrix"),
        (lambda g, w, z: aten.gelu_backward(g @ w.t(), z, approximate="tanh"), (X, W, R), "GeluTanhBackward", "matrix"),
        (
            lambda g, w, z: aten.silu_backward((g @ w.t()).view(4, 12, 32), z.view(4, 12, 32)),
            (X, W, R),
            "SiluBackward",
            "matrix",
        ),
    ],
)
def test_what_is_fused(function, inputs, op: str, source: str) -> None:
    problem = gemm(region(function, *inputs))
    assert (problem.op, problem.source) == (op, source)
    assert (problem.m, problem.n, problem.k, problem.batch) == (48, 32, 64, 1)
    assert (problem.a.layout, problem.b.layout) == ("row", "column")


def test_what_the_kernel_cannot_do_is_left_for_afterwards() -> None:
    problem = gemm(region(lambda x, w, b: F.leaky_relu(F.linear(x, w, b), 0.2), X, W, B))
    assert (problem.op, problem.source) == ("Identity", "row")
    assert problem.rest is not None
    assert problem.rest.activation is not None
    # Only one summand fits into the kernel, and the activation comes after both.
    problem = gemm(region(lambda x, w, b, r: (F.linear(x, w, b) + r).relu(), X, W, B, R))
    assert (problem.op, problem.source) == ("Identity", "row")
    assert problem.rest is not None
    assert problem.rest.addend is not None


def test_scales_reach_the_kernel() -> None:
    problem = gemm(workload_from_call(aten.addmm.default, (B, X, t(64, 32)), {"alpha": 0.5, "beta": 2.0}))
    assert (problem.alpha, problem.beta, problem.source) == (0.5, 2.0, "row")
    problem = gemm(region(lambda x, w, b: (x @ w.t()) / 4 + b, X, W, B))
    assert (problem.alpha, problem.beta) == (0.25, 1.0)


def test_batches_and_gaps() -> None:
    a, b = t(6, 16, 96)[..., :64], t(6, 40, 64).mT
    problem = gemm(workload_from_call(aten.bmm.default, (a, b)))
    assert (problem.batch, problem.m, problem.n, problem.k) == (6, 16, 40, 64)
    assert (problem.a.leading, problem.a.batch, problem.a.layout) == (96, 16 * 96, "row")
    assert (problem.b.leading, problem.b.batch, problem.b.layout) == (64, 40 * 64, "column")
    # Every second column is copied first: then the rows lie close.
    problem = gemm(workload_from_call(aten.mm.default, (t(16, 128)[:, ::2], t(64, 40))))
    assert (problem.a.leading, problem.a.layout) == (64, "row")


@pytest.mark.parametrize(("k", "alignment"), [(64, 8), (60, 4), (62, 2), (63, 1)])
def test_alignment_is_that_of_every_distance(k: int, alignment: int) -> None:
    assert gemm(workload_from_call(aten.mm.default, (t(16, k), t(k, 64)))).a.alignment == alignment
    wide = t(16, 2 * k)[:, :k] if k % 2 else t(16, k + 1)[:, :k]
    assert gemm(workload_from_call(aten.mm.default, (wide, t(k, 64)))).a.alignment <= alignment


def test_convolutions() -> None:
    forward = problem_of(convolution())
    assert isinstance(forward, ConvolutionProblem)
    assert forward.passes == ("forward",)
    both = problem_of(convolution_backward())
    assert isinstance(both, ConvolutionProblem)
    assert both.passes == ("input", "weight")
    only = problem_of(convolution_backward(mask=(False, True)))
    assert isinstance(only, ConvolutionProblem)
    assert only.passes == ("weight",)


def test_what_there_is_no_template_for() -> None:
    x = t(2, 3, 8, 8)
    cases = [
        workload_from_call(aten.mm.default, (t(4, 4, dtype=torch.float64), t(4, 4, dtype=torch.float64))),
        workload_from_call(aten.relu.default, (X,)),
        workload_from_call(aten.convolution.default, (x, t(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
        workload_from_call(aten.mm.default, (t(4, 0), t(0, 4))),
    ]
    assert [problem_of(workload) for workload in cases] == [None] * len(cases)


def test_a_schedule_for_something_else_is_refused() -> None:
    workload = product(64, 64, 64)
    problem = gemm(workload)
    convolutional = {"kernel": "sm80_convolution", "tile": [64, 64, 32], "warp": [32, 32], "stages": 3, "swizzle": 1}
    with pytest.raises(BuildError, match="is for convolutions"):
        gemm_spec(problem, parse(convolutional | {"slices": 1, "math": "tensor"}), workload.inputs)
    with pytest.raises(BuildError, match="math='tf32' with float16"):
        gemm_spec(problem, Sm80Gemm((64, 64, 32), (32, 32), 3, 1, "none", 1, "tf32"), workload.inputs)
    odd = product(64, 64, 63)
    with pytest.raises(Unsupported, match="16 bytes"):
        gemm_spec(gemm(odd), Sm90Gemm((64, 64, 64), (1, 1), "pingpong", "persistent", "tensor"), odd.inputs)
    with pytest.raises(Unsupported, match="more than two stages"):
        gemm_spec(gemm(odd), Sm80Gemm((64, 64, 32), (32, 32), 3, 1, "none", 1, "tensor"), odd.inputs)
