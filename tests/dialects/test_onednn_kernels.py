"""Every kernel of the oneDNN dialect against PyTorch in float64, packed weights that change, and fused operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from raftune.dialects.base import BuildError, Kernel, Unsupported
from raftune.dialects.onednn import OnednnDialect
from raftune.dialects.torch_ops import graph_module
from raftune.measure.inputs import make_inputs
from raftune.workload import Operator, Out, Workload

Check = Callable[[Workload, Kernel], None]
onednn = OnednnDialect()

pytestmark = pytest.mark.skipif(onednn.unavailable() is not None, reason=f"no oneDNN: {onednn.unavailable()}")


@pytest.mark.parametrize("family", ["mm", "addmm", "bmm", "baddbmm", "conv"])
def test_every_candidate_of_a_family_is_right(family: str, workloads: dict[str, Workload], check_kernel: Check) -> None:
    checked = 0
    for name, workload in workloads.items():
        if name.split("_")[0] != family or not onednn.supports(workload):
            continue
        for config in onednn.candidates(workload):
            try:
                check_kernel(workload, onednn.build(workload, config))
            except Exception as error:
                error.add_note(f"{name}: {config}")
                raise
            checked += 1
    assert checked > 0


def test_packing_once_is_offered_for_constant_weights_only(workloads: dict[str, Workload]) -> None:
    def offers(name: str) -> bool:
        return any(config.get("weight") == "packed_once" for config in onednn.candidates(workloads[name]))

    assert offers("mm_constant")
    assert offers("addmm_constant")
    assert not offers("mm_7x5x3")
    with pytest.raises(BuildError, match="packed_once"):
        onednn.build(workloads["mm_7x5x3"], {"kernel": "linear", "result": "row", "weight": "packed_once"})


def test_a_weight_that_was_packed_once_is_packed_again_when_written(workloads: dict[str, Workload]) -> None:
    workload = workloads["mm_constant"]
    kernel = onednn.build(workload, {"kernel": "linear", "result": "row", "weight": "packed_once"})
    x, w = make_inputs(workload, seed=3)
    torch.testing.assert_close(kernel(x, w), x @ w)
    w.mul_(-2)
    torch.testing.assert_close(kernel(x, w), x @ w)
    other = torch.randn(3, 5).t()
    torch.testing.assert_close(kernel(x, other), x @ other)
    torch.testing.assert_close(kernel(x, w), x @ w)


def test_freed_weights_are_not_mistaken_for_new_ones(workloads: dict[str, Workload]) -> None:
    """Each weight is dropped by its owner before the next is made, so that an allocator may hand out the address again."""
    workload = workloads["mm_constant"]
    kernel = onednn.build(workload, {"kernel": "linear", "result": "row", "weight": "packed_once"})
    x, _ = make_inputs(workload, seed=3)
    for _ in range(200):
        w = torch.randn(3, 5).t()
        torch.testing.assert_close(kernel(x, w), x @ w)
        del w


def test_inference_tensors_are_never_taken_from_the_store(workloads: dict[str, Workload]) -> None:
    workload = workloads["mm_constant"]
    kernel = onednn.build(workload, {"kernel": "linear", "result": "row", "weight": "packed_once"})
    with torch.inference_mode():
        x, w = make_inputs(workload, seed=3)
        kernel(x, w)
        w.mul_(-2)
        torch.testing.assert_close(kernel(x, w), x @ w)


@pytest.mark.parametrize(
    ("op", "kwargs"),
    [
        ("aten.relu.default", ()),
        ("aten.sigmoid.default", ()),
        ("aten.tanh.default", ()),
        ("aten.silu.default", ()),
        ("aten.gelu.default", ()),
        ("aten.gelu.default", (("approximate", "tanh"),)),
    ],
)
@pytest.mark.parametrize("name", ["mm_7x5x3", "addmm", "addmm_scaled", "bmm", "conv_3x3", "conv_1x1", "conv_transposed"])
def test_an_elementwise_operator_is_fused(
    name: str, op: str, kwargs: tuple[tuple[str, str], ...], workloads: dict[str, Workload], check_kernel: Check
) -> None:
    core = workloads[name]
    region = replace(core, operators=(*core.operators, Operator(op, (Out(0, 0),), kwargs)), outputs=(Out(1, 0),))
    assert onednn.candidates(region) == onednn.candidates(core)
    for config in onednn.candidates(region):
        check_kernel(region, onednn.build(region, config))


def test_a_region_whose_first_result_is_needed_is_not_supported(workloads: dict[str, Workload]) -> None:
    core = workloads["mm_7x5x3"]
    region = replace(
        core,
        operators=(*core.operators, Operator("aten.relu.default", (Out(0, 0),))),
        outputs=(Out(0, 0), Out(1, 0)),
        results=core.results * 2,
    )
    assert not onednn.supports(region)
    assert len(graph_module(region)(*make_inputs(region, seed=0))) == 2


@pytest.mark.parametrize("name", ["mm_double", "mm_empty_contraction", "add", "softmax", "adamw_False"])
def test_what_onednn_cannot_do_is_not_supported(name: str, workloads: dict[str, Workload]) -> None:
    assert not onednn.supports(workloads[name])
    assert not onednn.candidates(workloads[name])
    with pytest.raises(Unsupported):
        onednn.build(workloads[name], {"kernel": "linear", "result": "row", "weight": "plain"})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kernel": "magic"},
        {"kernel": "linear", "result": "diagonal", "weight": "plain"},
        {"kernel": "linear", "result": "row", "weight": ["plain"]},
        {"kernel": "linear", "result": "row", "weight": "plain", "also": 1},
    ],
)
def test_a_config_that_is_not_understood_is_named(config: dict[str, object], workloads: dict[str, Workload]) -> None:
    wrong = next((v for v in config.values() if v not in ("linear", "row", "plain")), None)
    with pytest.raises(BuildError) as caught:
        onednn.build(workloads["mm_7x5x3"], config)
    assert repr(wrong) in str(caught.value)


def test_features_are_the_same_numbers_for_every_config(workloads: dict[str, Workload]) -> None:
    for name in ("mm_constant", "conv_1x1", "conv_backward_1x1", "bmm"):
        rows = [onednn.features(workloads[name], config) for config in onednn.candidates(workloads[name])]
        assert len({tuple(row) for row in rows}) == 1
        assert all(isinstance(value, float) for row in rows for value in row.values())
