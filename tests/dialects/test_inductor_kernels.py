"""TorchInductor's kernels against PyTorch in float64 (a few: each is a C++ compilation), and when there is no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from raftune.dialects.base import BuildError, Kernel, Unsupported
from raftune.dialects.inductor import InductorDialect
from raftune.graph.workloads import workload_from_call
from raftune.measure.inputs import make_inputs
from raftune.workload import Workload

Check = Callable[[Workload, Kernel], None]
aten = torch.ops.aten
inductor = InductorDialect()
needs_compiler = pytest.mark.skipif(inductor.unavailable() is not None, reason=str(inductor.unavailable()))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Generated code has the thread count in it; one makes the smallest code to compile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("softmax_transposed", {"lowering": "default"}),
        ("layer_norm_backward", {"lowering": "default"}),
        ("addmm_scaled", {"lowering": "broadcast"}),
        ("adamw_True", {"lowering": "default"}),
        ("sgd_False", {"lowering": "default"}),
    ],
)
def test_compiled_code_is_right(name: str, config: dict[str, str], workloads: dict[str, Workload], check_kernel: Check) -> None:
    assert config in list(inductor.candidates(workloads[name]))
    check_kernel(workloads[name], inductor.build(workloads[name], config))


@needs_compiler
def test_channels_last_results_keep_their_strides(check_kernel: Check) -> None:
    x = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    workload = workload_from_call(aten.add.Tensor, (x, torch.empty(2, 3, 4, 5)))
    check_kernel(workload, inductor.build(workload, {"lowering": "default"}))


@pytest.mark.parametrize("name", ["conv_3x3", "conv_backward_3x3", "sdpa_plain", "mm_empty_result"])
def test_what_inductor_leaves_to_pytorch_is_not_supported(name: str, workloads: dict[str, Workload]) -> None:
    assert not inductor.supports(workloads[name])
    assert not inductor.candidates(workloads[name])
    with pytest.raises(Unsupported, match="no code"):
        inductor.build(workloads[name], {"lowering": "default"})


@pytest.mark.parametrize("config", [{}, {"lowering": "magic"}, {"lowering": "default"}, {"lowering": "default", "width": 7}])
def test_a_config_that_is_not_understood_is_named(config: dict[str, object], workloads: dict[str, Workload]) -> None:
    wrong = config.get("width", config.get("lowering"))
    with pytest.raises(BuildError) as caught:
        inductor.build(workloads["mm_64x64x64"], config)
    assert repr(wrong) in str(caught.value)


def test_without_a_compiler_it_is_unavailable_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    reason = InductorDialect().unavailable()
    assert reason is not None
    assert "C++ compiler" in reason
    assert "\n" not in reason
    assert InductorDialect().version()


def test_the_compiler_named_by_cxx_is_the_one_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in str(InductorDialect().unavailable())
    fake = tmp_path / "fancy-cc"
    fake.write_text("#!/bin/sh\necho 7.8.9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    assert InductorDialect().unavailable() is None
    assert InductorDialect().version().endswith("fancy-cc 7.8.9")


@needs_compiler
def test_a_second_build_is_taken_from_the_cache_on_disk(workloads: dict[str, Workload], check_kernel: Check) -> None:
    workload = workloads["softmax_transposed"]
    inductor.build(workload, {"lowering": "default"})
    hits = counters["inductor"]["fxgraph_cache_hit"]
    check_kernel(workload, inductor.build(workload, {"lowering": "default"}))
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1


@needs_compiler
def test_a_second_result_of_one_kernel_is_new_memory(workloads: dict[str, Workload]) -> None:
    kernel = inductor.build(workloads["softmax_transposed"], {"lowering": "default"})
    inputs = make_inputs(workloads["softmax_transposed"], seed=4)
    first, second = kernel(*inputs), kernel(*inputs)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)
