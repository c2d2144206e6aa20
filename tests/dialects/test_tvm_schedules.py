"""Candidates of the tvm dialect: tiled products, sampled traces, and configs that must be refused."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from raftune.dialects.base import BuildError, Unsupported
from raftune.dialects.tvm import TvmDialect
from raftune.graph.workloads import workload_from_call
from raftune.workload import In, Operator, Out, TensorSpec, Workload

aten = torch.ops.aten
DIALECT = TvmDialect()
LEFT, RIGHT = torch.randn(19, 24), torch.randn(33, 24).t()
PRODUCT = workload_from_call(aten.mm.default, (LEFT, RIGHT), {})
TILED = {"schedule": "tiled", "tile_m": 4, "tile_n": 16, "pack": True, "order": "nm", "unroll_k": 1}


IMAGE, KERNEL = torch.randn(2, 16, 9, 16), torch.randn(32, 16, 3, 3)
CONVOLUTION = (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def sampled(workload: Workload, count: int, seed: int) -> list[Any]:
    return [json.loads(json.dumps(config)) for config in DIALECT.sample(workload, count, seed)]


def test_importing_the_dialect_does_not_import_tvm() -> None:
    code = (
        "import sys; from raftune.dialects.tvm import TvmDialect; d = TvmDialect(); d.version(); d.unavailable();"
        "assert 'tvm' not in sys.modules, 'tvm was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_supports_candidates_and_features_do_not_import_tvm() -> None:
    code = (
        "import sys, torch; from raftune.dialects.tvm import TvmDialect;"
        "from raftune.graph.workloads import workload_from_call;"
        "w = workload_from_call(torch.ops.aten.mm.default, (torch.ones(4, 8), torch.ones(8, 16)), {}); d = TvmDialect();"
        "assert d.supports(w); assert all(d.features(w, c) for c in d.candidates(w)); assert 'tvm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_candidates_are_distinct_and_start_with_the_default() -> None:
    configs = [json.dumps(c, sort_keys=True) for c in DIALECT.candidates(PRODUCT)]
    assert configs[0] == '{"schedule": "default"}'
    assert len(set(configs)) == len(configs)
    assert configs == [json.dumps(c, sort_keys=True) for c in DIALECT.candidates(PRODUCT)]


def test_every_tiling_of_a_convolution_and_its_gradients_is_right() -> None:
    grad = torch.randn(2, 32, 9, 16)
    backward = (grad, IMAGE, KERNEL, None, *CONVOLUTION[3:], [True, True, False])
    for op, arguments in ((aten.convolution.default, CONVOLUTION), (aten.convolution_backward.default, backward)):
        workload = workload_from_call(op, arguments, {})
        configs = DIALECT.candidates(workload)
        assert {config.get("columns") for config in configs} == {None, "channels", "pixels"}
        expected = op(*arguments)
        for config in configs:
            found = DIALECT.build(workload, config)(*(a for a in arguments if isinstance(a, torch.Tensor)))
            pairs = zip(found, expected, strict=False) if isinstance(found, tuple) else [(found, expected)]
            for mine, theirs in pairs:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_a_convolution_stores_what_is_then_done_to_its_elements() -> None:
    operators = (
        Operator("aten.convolution.default", (In(0), In(1), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)),
        Operator("aten.add.Tensor", (Out(0), In(2))),
        Operator("aten.relu.default", (Out(1),)),
    )
    residual = torch.randn(2, 32, 9, 16)
    specs = [TensorSpec("float32", tuple(t.shape), t.stride()) for t in (IMAGE, KERNEL, residual)]
    workload = Workload(operators, tuple(specs), (Out(2),), (specs[2],))
    expected = (torch.conv2d(IMAGE, KERNEL, padding=1) + residual).relu()
    for config in DIALECT.candidates(workload):
        found = DIALECT.build(workload, config)(IMAGE, KERNEL, residual)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    pooled = dataclasses.replace(workload, operators=(operators[0], Operator("aten.sum.default", (Out(0),))), outputs=(Out(1),))
    assert not DIALECT.supports(pooled)


@pytest.mark.parametrize("order", ["mn", "nm"])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 16), (4, 32), (5, 8)])
def test_tiled_products_are_right(order: str, pack: bool, tile_m: int, tile_n: int) -> None:
    config = {**TILED, "order": order, "pack": pack, "tile_m": tile_m, "tile_n": tile_n, "unroll_k": 4}
    torch.testing.assert_close(DIALECT.build(PRODUCT, config)(LEFT, RIGHT), LEFT @ RIGHT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.addmm.default, (torch.randn(16), torch.randn(12, 8), torch.randn(16, 8).t())),
        (aten._softmax.default, (torch.randn(6, 20), -1, False)),
        (aten.gelu.default, (torch.randn(6, 20),)),
        (aten.sum.dim_IntList, (torch.randn(12, 16), [0])),
    ],
)
def test_samples_are_right_and_the_same_for_the_same_seed(op: Any, args: tuple[Any, ...]) -> None:
    workload = workload_from_call(op, args, {})
    configs = sampled(workload, 3, seed=5)
    assert configs
    assert configs == sampled(workload, 3, seed=5)
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    for config in configs:
        torch.testing.assert_close(DIALECT.build(workload, config)(*inputs), op(*args), rtol=1e-5, atol=1e-5)
        assert DIALECT.features(workload, config)["trace_length"] > 0


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.bmm.default, (torch.randn(3, 20, 8), torch.randn(3, 8, 40))),
        (aten.native_layer_norm.default, (torch.randn(6, 35), [35], torch.randn(35), torch.randn(35), 1e-5)),
        (aten.sum.dim_IntList, (torch.randn(12, 32), [0])),
        (aten.add.Tensor, (torch.randn(6, 35), torch.randn(35))),
    ],
)
def test_parallel_schedules_are_right(op: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftune.dialects.tvm.target.thread_count", lambda: 2)
    monkeypatch.setattr("raftune.dialects.tvm.dialect._PARALLEL_WORK", 1)
    workload = workload_from_call(op, args, {})
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    threads = torch.get_num_threads()
    try:
        for config in DIALECT.candidates(workload)[:3]:
            kernel = DIALECT.build(workload, config)
            for torch_threads in (2, 1, 3):
                torch.set_num_threads(torch_threads)
                torch.testing.assert_close(kernel(*inputs), op(*args), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


def test_parallel_loops_run_on_pytorchs_threads() -> None:
    code = """
import os, torch
from raftune.dialects.tvm import TvmDialect
from raftune.dialects.tvm.team import has_team
from raftune.graph.workloads import workload_from_call
torch.set_num_threads(3)
x = torch.randn(512, 1024)
gelu = workload_from_call(torch.ops.aten.gelu.default, (x,), {})
kernel = TvmDialect().build(gelu, {"schedule": "default"})
(x + 1.0).sum()
def ran():  # threads that used processor time
    ticks = {}
    for thread in os.listdir("/proc/self/task"):
        fields = open(f"/proc/self/task/{thread}/stat").read().rpartition(")")[2].split()
        ticks[thread] = int(fields[11]) + int(fields[12])
    return ticks
before = after = ran()
for _ in range(10000):  # a tick is 10 ms: the faster the machine, the more calls until each thread has one
    kernel(x)
    after = ran()
    if sum(after[t] > before.get(t, 0) for t in after) >= 3:
        break
assert has_team() and set(after) == set(before), (before, after)
assert sum(after[t] > before[t] for t in after) == 3, (before, after)
torch.testing.assert_close(kernel(x), torch.nn.functional.gelu(x), rtol=1e-5, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_seed_draws_other_schedules() -> None:
    assert sampled(PRODUCT, 3, seed=1) != sampled(PRODUCT, 3, seed=2)


def test_variations_differ_from_their_parents_and_are_right() -> None:
    parents = sampled(PRODUCT, 2, seed=1)
    found = [json.loads(json.dumps(config)) for config in DIALECT.vary(PRODUCT, parents, 4, seed=1)]
    assert found[:2] == parents
    children = found[2:]
    assert len({json.dumps(config) for config in [*parents, *children]}) == 2 + len(children)
    assert len(children) == 4
    instructions = {json.dumps(config["trace"][0]) for config in parents}
    assert any(json.dumps(config["trace"][0]) in instructions for config in children)
    for config in children:
        torch.testing.assert_close(DIALECT.build(PRODUCT, config)(LEFT, RIGHT), LEFT @ RIGHT, rtol=1e-5, atol=1e-5)
    assert found == [json.loads(json.dumps(config)) for config in DIALECT.vary(PRODUCT, parents, 4, seed=1)]


def test_schedules_of_another_workload_are_fitted_to_this_one() -> None:
    other = workload_from_call(aten.mm.default, (torch.randn(36, 40), torch.randn(48, 40).t()), {})
    parents = sampled(other, 4, seed=1)
    found = [json.loads(json.dumps(config)) for config in DIALECT.vary(PRODUCT, parents, 0, seed=1)]
    assert 1 <= len(found) <= 4
    for config in found:
        for where, value in config["trace"][1]:
            if config["trace"][0][where][0] == "SamplePerfectTile":
                assert math.prod(value) in (*LEFT.shape, *RIGHT.shape)
        torch.testing.assert_close(DIALECT.build(PRODUCT, config)(LEFT, RIGHT), LEFT @ RIGHT, rtol=1e-5, atol=1e-5)


def test_what_no_longer_applies_has_no_variations() -> None:
    of_another = sampled(workload_from_call(aten._softmax.default, (torch.randn(6, 20), 1, False), {}), 1, seed=1)
    assert DIALECT.vary(PRODUCT, [{"schedule": "default"}], 4, seed=1) == []
    assert DIALECT.vary(PRODUCT, of_another, 2, seed=1) == []


def test_intrinsics_that_were_not_imported_can_be_later() -> None:
    code = (
        "from raftune.dialects.tvm.schedule import space; space.load(); import sys; from importlib.util import find_spec;"
        "assert not set(space._NO_INTRINSICS) & set(sys.modules);"
        "import tvm.s_tir.tensor_intrin as package; assert not hasattr(package, 'cuda') and hasattr(package, 'x86');"
        "assert all(find_spec(name).origin.endswith('.py') for name in space._NO_INTRINSICS)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"schedule": "fastest"},
        {"schedule": ["default"]},
        {"schedule": "default", "tile_m": 4},
        {**TILED, "tile_m": 0},
        {**TILED, "tile_m": "4"},
        {**TILED, "tile_n": True},
        {**TILED, "tile_m": 64, "tile_n": 256},
        {**TILED, "order": "__import__('os')"},
        {**TILED, "pack": 1},
        {**TILED, "unroll_k": 10**9},
        {"schedule": "trace", "trace": None},
        {"schedule": "trace", "trace": [[], [], []]},
        {"schedule": "trace", "trace": [["GetSBlock"], []]},
        {"schedule": "trace", "trace": [[["Tensorize", ["b0", "x"], [True], []]], []]},
        {"schedule": "trace", "trace": [[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]},
        {"schedule": "trace", "trace": [[["Annotate", ["b0", 1], ["pragma_import_llvm"], []]], []]},
        {"schedule": "trace", "trace": [[["GetSBlock", [], [{"a": 1}], ["b0"]]], []]},
        {"schedule": "trace", "trace": [[["GetLoops", ["b9"], [], ["l0"]]], [[0, "x"]]]},
        {"schedule": "trace", "trace": [[["SampleCategorical", [], [[0, 10**9], [0.5, 0.5]], ["v0"]]], [[0, 1]]]},
    ],
)
def test_wrong_configs_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(BuildError):
        DIALECT.build(PRODUCT, config)


def test_a_trace_of_another_workload_is_refused_or_right() -> None:
    other = workload_from_call(aten._softmax.default, (torch.randn(6, 20), -1, False), {})
    for config in sampled(other, 2, seed=3):
        with pytest.raises(BuildError):
            DIALECT.build(PRODUCT, config)


def test_a_schedule_that_unrolls_without_end_is_refused() -> None:
    trace = [
        [
            ["GetSBlock", [], ["reduce_1", "main"], ["b0"]],
            ["GetLoops", ["b0"], [], ["l0", "l1", "l2"]],
            *(["Unroll", [f"l{i}"], [], []] for i in range(3)),
        ],
        [],
    ]
    with pytest.raises(BuildError, match="statements"):
        DIALECT.build(PRODUCT, {"schedule": "trace", "trace": trace})


def test_operators_without_a_tiled_schedule_refuse_one() -> None:
    workload = workload_from_call(aten.relu.default, (torch.randn(4),), {})
    with pytest.raises(BuildError, match="product"):
        DIALECT.build(workload, TILED)


def test_unsupported_workload_is_refused_by_build() -> None:
    workload = workload_from_call(aten.cumsum.default, (torch.randn(4), 0), {})
    with pytest.raises(Unsupported):
        DIALECT.build(workload, {"schedule": "default"})
