"""Every formulation of the aten dialect against PyTorch in float64, and what is offered for which specs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from raftune.dialects.aten import AtenDialect
from raftune.dialects.base import BuildError, Kernel
from raftune.graph.workloads import workload_from_call
from raftune.workload import Operator, Out, Workload, canonical_json

Check = Callable[[Workload, Kernel], None]
ops = torch.ops.aten
aten = AtenDialect()
FAMILIES = ["mm", "addmm", "bmm", "baddbmm", "conv", "sdpa", "adamw", "sgd", "sum", "softmax", "log", "layer", "embedding"]


def names(workload: Workload) -> set[Any]:
    return {config["formulation"] for config in aten.candidates(workload)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_candidate_of_a_family_is_right(family: str, workloads: dict[str, Workload], check_kernel: Check) -> None:
    alternatives = 0
    for name, workload in workloads.items():
        if name.split("_")[0] != family:
            continue
        for config in aten.candidates(workload):
            try:
                check_kernel(workload, aten.build(workload, config))
            except Exception as error:
                error.add_note(f"{name}: {config}")
                raise
            alternatives += config != {"formulation": "default"}
    assert alternatives > 0


@pytest.mark.parametrize("name", ["add", "gelu", "cat", "where", "max_pool", "batch_norm", "softmax_transposed"])
def test_other_operators_run_as_pytorch_runs_them(name: str, workloads: dict[str, Workload], check_kernel: Check) -> None:
    for config in aten.candidates(workloads[name]):
        check_kernel(workloads[name], aten.build(workloads[name], config))


def test_the_default_comes_first_and_configs_are_distinct_json(workloads: dict[str, Workload]) -> None:
    for workload in workloads.values():
        assert aten.supports(workload)
        configs = list(aten.candidates(workload))
        assert configs[0] == {"formulation": "default"}
        assert len({canonical_json(config) for config in configs}) == len(configs)
        assert configs == list(aten.candidates(Workload.from_json(workload.to_json())))


@pytest.mark.parametrize(
    ("name", "offered", "not_offered"),
    [
        ("mm_7x5x3", {"layout", "bmm", "broadcast"}, {"vector", "outer", "loop", "fold", "split_k"}),
        ("mm_3x512x2", {"split_k"}, {"vector", "outer"}),
        ("mm_17x31x1", {"vector"}, {"outer"}),
        ("mm_5x1x9", {"outer"}, {"broadcast", "vector"}),
        ("mm_1x1x1", {"vector", "outer"}, {"layout"}),
        ("mm_empty_contraction", {"default"}, {"layout", "bmm"}),
        ("bmm", {"layout", "loop"}, {"fold", "bmm"}),
        ("bmm_shared", {"fold", "loop"}, {"bmm"}),
        ("conv_1x1", {"matmul_channels_last", "im2col", "memory"}, {"taps", "im2col_at_once"}),
        ("conv_3x3", {"im2col", "im2col_at_once"}, {"matmul_channels_last"}),
        ("conv_depthwise", {"taps", "memory"}, {"im2col", "slow", "matmul_channels_last"}),
        ("conv_transposed", {"memory"}, {"im2col", "slow"}),
        ("conv_backward_grouped", {"separate", "memory"}, {"im2col"}),
        ("sdpa_masked", {"math", "math_by_entry"}, {"memory"}),
        ("softmax_transposed", {"composed", "contiguous"}, {"memory"}),
        ("max_pool", {"memory"}, {"contiguous"}),
        ("adamw_False", {"default", "foreach", "fused"}, set()),
    ],
)
def test_a_formulation_is_offered_where_it_makes_a_difference(
    name: str, offered: set[str], not_offered: set[str], workloads: dict[str, Workload]
) -> None:
    found = names(workloads[name])
    assert offered <= found
    assert not not_offered & found


def test_one_product_over_all_samples_comes_first_where_the_weight_is_larger_than_the_patches() -> None:
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for size, expected in ((2, "im2col_at_once"), (32, "im2col")):
        x, w = torch.empty(4, 16, size, size), torch.empty(16, 16, 3, 3)
        forward = workload_from_call(ops.convolution.default, (x, w, None, *rest))
        backward = workload_from_call(
            ops.convolution_backward.default, (x, x, w, None, *rest, [True, True, False]), used=[0, 1]
        )
        assert aten.candidates(forward)[1]["formulation"] == expected
        separate = [c for c in aten.candidates(backward) if c["formulation"] == "separate"]
        first = "im2col_at_once" if size == 2 else "backward"
        assert first in (separate[0]["input"], separate[0]["weight"])
        assert {"im2col", "im2col_at_once"} <= {c["weight"] for c in separate} & {c["input"] for c in separate}


def test_layouts_that_are_already_there_are_not_offered_again(workloads: dict[str, Workload]) -> None:
    layouts = [c for c in aten.candidates(workloads["mm_both_transposed"]) if c["formulation"] == "layout"]
    assert {"formulation": "layout", "a": "column", "b": "column", "result": "row"} not in layouts
    assert len(layouts) == 7


def test_an_overload_without_a_python_binding_of_its_signature_still_runs(check_kernel: Check) -> None:
    x = torch.empty(4, 3)
    for op, args, kwargs in (
        (ops._to_copy.default, (x,), {"dtype": torch.float64}),
        (ops.sum.default, (x,), {}),
        (ops.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}),
        (ops.var_mean.correction, (x, [1]), {"correction": 0, "keepdim": True}),
        (ops.add.Scalar, (x, 3), {}),
        (ops.sub.Tensor, (2 * x, x), {"alpha": 3}),
        (ops.silu_backward.default, (x, x + 1), {}),
    ):
        workload = workload_from_call(op, args, kwargs)
        check_kernel(workload, aten.build(workload, {"formulation": "default"}))


def test_only_the_results_that_are_used_are_returned(check_kernel: Check) -> None:
    x = torch.empty(4, 6)
    for used in ([1], [0, 2], [0, 1, 2]):
        workload = workload_from_call(ops.native_layer_norm.default, (x, [6], None, None, 1e-5), used=used)
        check_kernel(workload, aten.build(workload, {"formulation": "default"}))


def test_a_region_of_several_operators_runs_them_in_order(workloads: dict[str, Workload], check_kernel: Check) -> None:
    core = workloads["mm_7x5x3"]
    region = replace(
        core,
        operators=(*core.operators, Operator("aten.relu.default", (Out(0, 0),))),
        outputs=(Out(0, 0), Out(1, 0)),
        results=core.results * 2,
    )
    assert aten.candidates(region) == [{"formulation": "default"}]
    check_kernel(region, aten.build(region, {"formulation": "default"}))


def test_a_missing_momentum_option_does_not_need_buffers(workloads: dict[str, Workload], check_kernel: Check) -> None:
    for formulation in ("default", "foreach", "fused"):
        check_kernel(workloads["sgd_plain"], aten.build(workloads["sgd_plain"], {"formulation": formulation}))


@pytest.mark.parametrize(
    ("name", "config", "wrong"),
    [
        ("mm_7x5x3", {}, None),
        ("mm_7x5x3", {"formulation": "magic"}, "magic"),
        ("mm_7x5x3", {"formulation": 3}, 3),
        ("mm_7x5x3", {"formulation": "layout", "a": "diagonal", "b": "row", "result": "row"}, "diagonal"),
        ("mm_7x5x3", {"formulation": "layout", "a": "row", "b": "row", "result": "row", "bias": "beta"}, "beta"),
        ("mm_7x5x3", {"formulation": "split_k", "parts": 4}, 4),
        ("mm_7x5x3", {"formulation": "outer"}, "outer"),
        ("mm_7x5x3", {"formulation": "default", "hidden": 1}, 1),
        ("mm_7x5x3", {"formulation": "memory", "layout": "channels_last"}, "channels_last"),
        ("softmax", {"formulation": "contiguous", "inputs": [5]}, [5]),
        ("softmax", {"formulation": "contiguous", "inputs": "all"}, "all"),
        ("conv_grouped", {"formulation": "im2col"}, "im2col"),
        ("conv_3x3", {"formulation": "separate", "layout": "contiguous", "input": "backward"}, "separate"),
        ("conv_backward_3x3", {"formulation": "separate", "layout": "sideways"}, "sideways"),
        ("sdpa_plain", {"formulation": "flash"}, "flash"),
        ("adamw_False", {"formulation": "parallel"}, "parallel"),
        ("gelu", {"formulation": "composed"}, "composed"),
    ],
)
def test_a_config_that_is_not_understood_is_named(
    name: str, config: dict[str, object], wrong: object, workloads: dict[str, Workload]
) -> None:
    with pytest.raises(BuildError) as caught:
        aten.build(workloads[name], config)
    assert repr(wrong) in str(caught.value)


def test_features_are_the_same_numbers_for_every_config(workloads: dict[str, Workload]) -> None:
    for name in ("addmm", "conv_3x3", "add"):
        rows = [aten.features(workloads[name], config) for config in aten.candidates(workloads[name])]
        assert all(isinstance(value, float) for row in rows for value in row.values())
    layouts = [c for c in aten.candidates(workloads["mm_7x5x3"]) if c["formulation"] == "layout"]
    rows = [tuple(aten.features(workloads["mm_7x5x3"], config).values()) for config in layouts]
    assert len(set(rows)) == len(rows)
