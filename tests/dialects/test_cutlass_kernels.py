"""CUTLASS's templates through NVIDIA's compiler: they compile, load without a driver, and know what they can compute.

Nothing is launched: what a kernel computes is checked where there is a device. The functions of the epilogues are compiled
for the host as well, and compared with PyTorch's.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cutlass_workloads import convolution, convolution_backward

from raftune.dialects.base import BuildError
from raftune.dialects.cutlass import compile as compiler
from raftune.dialects.cutlass import toolchain
from raftune.dialects.cutlass.kernel import Operands, convolution_problem, gemm_problem
from raftune.dialects.cutlass.library import Library
from raftune.dialects.cutlass.problem import GemmProblem, problem_of
from raftune.dialects.cutlass.schema import Schedule, Sm80Convolution, Sm80Gemm, Sm90Gemm
from raftune.dialects.cutlass.spec import KernelSpec, convolution_spec
from raftune.graph.workloads import workload_from_call
from raftune.workload import Workload

TOOLS = toolchain.find()
pytestmark = [
    pytest.mark.skipif(isinstance(TOOLS, str), reason=str(TOOLS)),
    pytest.mark.timeout(900),
]

aten = torch.ops.aten
HALF = torch.float16


def _gemm(schedule: Schedule, op: str, source: str, dtype: str = "float16", layouts=("row", "row")) -> KernelSpec:
    alignment = 16 // {"float32": 4}.get(dtype, 2)
    alignments = (1, 1, 1) if schedule.math == "simt" else (alignment,) * 3
    return KernelSpec(schedule, dtype, "gemm", layouts, alignments, op, source)


SM80 = {
    "plain": _gemm(Sm80Gemm((128, 128, 32), (64, 64), 3, 1, "none", 1, "tensor"), "Identity", "none"),
    "bias_gelu": _gemm(Sm80Gemm((64, 64, 32), (32, 32), 4, 4, "none", 1, "tensor"), "Gelu", "row", "bfloat16"),
    "serial": _gemm(
        Sm80Gemm((128, 64, 64), (64, 32), 3, 1, "serial", 4, "tensor"), "Relu", "row", layouts=("column", "column")
    ),
    "stream": _gemm(Sm80Gemm((128, 128, 32), (64, 64), 3, 1, "stream", 1, "tensor"), "Silu", "matrix"),
    "backward": _gemm(Sm80Gemm((64, 128, 32), (32, 64), 3, 1, "none", 1, "tensor"), "GeluBackward", "matrix"),
    "tf32": _gemm(Sm80Gemm((128, 128, 16), (64, 64), 3, 1, "none", 1, "tf32"), "Identity", "matrix", "float32"),
    "3xtf32": _gemm(Sm80Gemm((64, 64, 16), (32, 32), 3, 1, "none", 1, "3xtf32"), "Tanh", "row", "float32"),
    "simt": _gemm(Sm80Gemm((64, 64, 8), (32, 64), 3, 1, "none", 1, "simt"), "Identity", "none", "float32"),
}
SM90 = {
    "pingpong": _gemm(Sm90Gemm((64, 128, 64), (2, 1), "pingpong", "persistent", "tensor"), "GeluTanh", "row"),
    "cooperative": _gemm(Sm90Gemm((128, 128, 64), (1, 1), "cooperative", "persistent", "tensor"), "ReluBackward", "matrix"),
    "stream_k": _gemm(Sm90Gemm((128, 256, 64), (1, 2), "cooperative", "stream_k", "tensor"), "Identity", "matrix", "bfloat16"),
    "tf32": _gemm(
        Sm90Gemm((128, 128, 32), (1, 1), "cooperative", "persistent", "tf32"), "Relu", "none", "float32", ("row", "column")
    ),
}


def _convolutions() -> dict[str, tuple[KernelSpec, Workload]]:
    schedule = Sm80Convolution((128, 64, 32), (64, 32), 3, 1, 1, "tensor")
    split = Sm80Convolution((64, 64, 32), (32, 32), 3, 1, 8, "tensor")
    found = {}
    for name, workload, which, how in (
        ("forward", convolution(), "forward", schedule),
        ("input", convolution_backward(mask=(True, False)), "input", schedule),
        ("strided input", convolution_backward(stride=2, mask=(True, False)), "input", schedule),
        ("weight", convolution_backward(mask=(False, True)), "weight", split),
    ):
        problem = problem_of(workload)
        assert problem is not None
        assert not isinstance(problem, GemmProblem)
        found[name] = convolution_spec(problem, how, which), workload
    return found


@pytest.fixture(scope="module")
def kernels() -> dict[KernelSpec, Path | BuildError]:
    """Everything in one go: several kernels a file, several compilers at once."""
    forward = [spec for spec, _ in _convolutions().values()]
    return compiler.compile_all([*SM80.values(), *forward], "sm_80") | compiler.compile_all(SM90.values(), "sm_90a")


def library(kernels: dict[KernelSpec, Path | BuildError], spec: KernelSpec) -> Library:
    result = kernels[spec]
    assert isinstance(result, Path), result
    return Library(result, spec)


@pytest.mark.parametrize("spec", [*SM80.values(), *SM90.values()], ids=[*SM80, *(f"sm90 {name}" for name in SM90)])
def test_a_product_compiles_loads_and_knows_its_alignment(kernels, spec: KernelSpec) -> None:
    loaded = library(kernels, spec)
    assert loaded.refusal(_struct(spec, 512, 256, 512)) is None
    if spec.schedule.math == "simt":
        assert loaded.refusal(_struct(spec, 511, 255, 513)) is None
        return
    for m, n, k in ((512, 256, 511), (512, 255, 512)):
        if (m, n, k) == (512, 256, 511) and spec.layouts == ("column", "row"):
            continue
        assert loaded.refusal(_struct(spec, m, n, k)) == "misaligned operand"
    # Sizes that fit, in memory whose rows are no multiple of 16 bytes apart.
    apart = _struct(spec, 512, 256, 512)
    apart.lda += 1
    assert loaded.refusal(apart) == "misaligned operand"


def _struct(spec: KernelSpec, m: int, n: int, k: int):
    dtype = getattr(torch, spec.dtype)
    a = torch.empty(m, k, dtype=dtype) if spec.layouts[0] == "row" else torch.empty(k, m, dtype=dtype).t()
    b = torch.empty(k, n, dtype=dtype) if spec.layouts[1] == "row" else torch.empty(n, k, dtype=dtype).t()
    problem = problem_of(workload_from_call(aten.mm.default, (a, b)))
    assert isinstance(problem, GemmProblem)
    slices = spec.schedule.slices if isinstance(spec.schedule, Sm80Gemm) else 1
    struct = gemm_problem(problem, Operands(problem.a, problem.b), slices, 132)
    struct.lds = n if spec.source == "matrix" else 0
    return struct


@pytest.mark.parametrize("name", ["forward", "input", "strided input", "weight"])
def test_a_convolution_compiles_loads_and_knows_its_channels(kernels, name: str) -> None:
    spec, workload = _convolutions()[name]
    problem = problem_of(workload)
    assert problem is not None
    loaded = library(kernels, spec)
    assert isinstance(spec.schedule, Sm80Convolution)
    struct = convolution_problem(problem, spec.schedule.slices, adds=False)
    assert loaded.refusal(struct) is None
    struct.c = 63
    assert loaded.refusal(struct) == "invalid problem"


def test_kernels_of_one_file_are_found_apart_and_not_compiled_again(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find", lambda: "no compiler is needed")
    again = compiler.compile_all(SM80.values(), "sm_80")
    assert again == {spec: kernels[spec] for spec in SM80.values()}
    assert len(set(again.values())) == len(SM80)
    wrong = compiler.compile_all([_gemm(SM80["plain"].schedule, "Sigmoid", "none")], "sm_80")
    assert [str(result) for result in wrong.values()] == ["no compiler is needed"]


def test_a_library_with_another_kernel_is_refused(kernels, tmp_path: Path) -> None:
    path = kernels[SM90["tf32"]]
    with pytest.raises(BuildError, match="is not a library with this kernel"):
        Library(path, SM80["plain"])
    (tmp_path / "text.so").write_text("nothing to run")
    with pytest.raises(BuildError, match="is not a library with this kernel"):
        Library(tmp_path / "text.so", SM80["plain"])


def test_one_kernel_that_does_not_compile_costs_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler is stood in for by one that refuses a file with a certain kernel."""
    bad, good = SM80["plain"], SM80["backward"]
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        f'if grep -q {bad.symbol} kernels.cu; then echo "kernels.cu(7): error: too large" >&2; exit 2; fi\n'
        'echo library >"$last"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("RAFTUNE_KERNELS", str(tmp_path / "kept"))
    monkeypatch.setattr(toolchain, "find", lambda: toolchain.Toolchain(nvcc, ()))
    results = compiler.compile_all([bad, good], "sm_80")
    assert str(results[bad]) == "nvcc failed with 2: kernels.cu(7): error: too large"
    assert isinstance(results[good], Path)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [compiler.library_name(good, "sm_80")]


OPS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "Relu": (F.relu, False),
    "Gelu": (F.gelu, False),
    "GeluTanh": (lambda x: F.gelu(x, approximate="tanh"), False),
    "Silu": (F.silu, False),
    "Tanh": (torch.tanh, False),
    "Sigmoid": (torch.sigmoid, False),
    "ReluBackward": (lambda g, z: aten.threshold_backward(g, z, 0), True),
    "GeluBackward": (aten.gelu_backward, True),
    "GeluTanhBackward": (lambda g, z: aten.gelu_backward(g, z, approximate="tanh"), True),
    "SiluBackward": (aten.silu_backward, True),
    "TanhBackward": (aten.tanh_backward, True),
    "SigmoidBackward": (aten.sigmoid_backward, True),
}


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("epilogue")
    lines = ['#include "epilogue.cuh"']
    for name, (_, backward) in OPS.items():
        parameters, arguments = ("float x, float z", "x, z") if backward else ("float x", "x")
        lines.append(f'extern "C" float {name}({parameters}) {{ return raftune::op::{name}::apply({arguments}); }}')
    (folder / "ops.cu").write_text("\n".join(lines))
    assert not isinstance(TOOLS, str)
    includes = [f"-I{path}" for path in TOOLS.includes]
    flags = ["-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-w", "--expt-relaxed-constexpr", "-arch=sm_80"]
    subprocess.run([TOOLS.nvcc, *flags, *includes, "ops.cu", "-o", "ops.so"], cwd=folder, check=True, timeout=300)
    return ctypes.CDLL(str(folder / "ops.so"))


@pytest.mark.parametrize("name", list(OPS))
def test_the_functions_of_the_epilogue_are_pytorchs(on_host: ctypes.CDLL, name: str) -> None:
    function, backward = OPS[name]
    compiled = getattr(on_host, name)
    compiled.restype, compiled.argtypes = ctypes.c_float, [ctypes.c_float] * (2 if backward else 1)
    x = torch.cat([torch.linspace(-6, 6, 101), torch.tensor([0.0, -0.0, float("nan")])])
    inputs = (torch.linspace(-2, 3, x.numel()), x) if backward else (x,)
    found = torch.tensor([compiled(*map(float, values)) for values in zip(*inputs, strict=True)])
    wanted = function(*(value.double() for value in inputs)).float()
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)
