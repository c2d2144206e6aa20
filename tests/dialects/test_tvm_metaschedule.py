"""Plain TVM with our log as its database and our cost model as its cost model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raftune.device import current_device
from raftune.dialects import registry
from raftune.graph.workloads import workload_from_call
from raftune.log import TuningLog
from raftune.measurement import Outcome, Policy, Status
from raftune.workload import Candidate, Config, Workload

pytest.importorskip("tvm")
aten = torch.ops.aten
LEFT, RIGHT = torch.empty(64, 32), torch.empty(32, 48)


class Product(torch.nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right)


@pytest.fixture(scope="module")
def product() -> Workload:
    return workload_from_call(aten.mm.default, (LEFT, RIGHT))


@pytest.fixture(scope="module")
def schedules(product: Workload) -> Sequence[Config]:
    configs = registry.get("tvm").sample(product, 3, 0)
    assert len(configs) == 3
    return configs


@pytest.fixture
def log(tmp_path: Path, product: Workload, schedules: Sequence[Config]) -> TuningLog:
    """The third schedule is the fastest, the first did not run, and a better one is another device's."""
    log = TuningLog(tmp_path / "log.sqlite")
    here = current_device(torch.get_num_threads())
    elsewhere = dataclasses.replace(here, model="another processor")
    tvm = registry.get("tvm")
    first, second, third = (registry.candidate(tvm, config) for config in schedules)
    log.record(product, registry.default_candidate(product), here, Policy(), Outcome(Status.OK, time_us=20.0), is_default=True)
    log.record(product, first, here, Policy(), Outcome(Status.WRONG), is_default=False)
    log.record(product, second, here, Policy(), Outcome(Status.OK, time_us=9.0), is_default=False)
    log.record(product, third, here, Policy(), Outcome(Status.OK, time_us=7.0), is_default=False)
    log.record(product, second, elsewhere, Policy(), Outcome(Status.OK, time_us=1.0), is_default=False)
    return log


def relax_product(left: Tensor, right: Tensor) -> Any:
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    return relax.transform.LegalizeOps()(from_exported_program(torch.export.export(Product(), (left, right))))


def test_relax_compiles_from_the_log(log: TuningLog, schedules: Sequence[Config]) -> None:
    import tvm
    from tvm import relax

    from raftune.dialects.tvm.metaschedule import as_metaschedule_database
    from raftune.dialects.tvm.target import host_target

    target = host_target().target
    left, right = torch.randn(64, 32), torch.randn(32, 48)
    with target, as_metaschedule_database(log) as database:
        assert len(database) == 2
        module = relax.transform.MetaScheduleApplyDatabase()(relax_product(left, right))
        other = relax.transform.MetaScheduleApplyDatabase()(relax_product(torch.empty(64, 31), torch.empty(31, 48)))
    is_scheduled = "tirx.is_scheduled"
    (scheduled,) = (f for v, f in module.functions.items() if v.name_hint != "main")
    (unknown,) = (f for v, f in other.functions.items() if v.name_hint != "main")
    assert is_scheduled in scheduled.attrs
    assert is_scheduled not in unknown.attrs

    machine = relax.VirtualMachine(tvm.compile(module, target=target), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(left.numpy()), tvm.runtime.tensor(right.numpy()))[0]
    np.testing.assert_allclose(found.numpy(), left.numpy() @ right.numpy(), rtol=1e-4, atol=1e-5)


def test_the_database_serves_the_fastest_trace_first(log: TuningLog, schedules: Sequence[Config]) -> None:
    import tvm

    from raftune.dialects.tvm.metaschedule import as_metaschedule_database
    from raftune.dialects.tvm.schedule.space import plain_trace
    from raftune.dialects.tvm.target import host_target

    (function,) = (f for v, f in relax_product(LEFT, RIGHT).functions.items() if v.name_hint != "main")
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with as_metaschedule_database(log) as database:
        top = database.get_top_k(database.commit_workload(module), 5)
        assert [float(record.run_secs[0]) for record in top] == pytest.approx([7e-6, 9e-6])
        best = database.query_schedule(module, host_target().target, "main")
        # Its decisions are those of the fastest schedule in the log.
        assert plain_trace(best)[1] == schedules[2]["trace"][1]
        assert len(database.get_all_tuning_records()) == 2


class Ranking:
    """Predicts by the order in which candidates are listed."""

    def __init__(self, order: Sequence[Candidate]) -> None:
        self._order = list(order)

    def predict(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Any]:
        del workload

        @dataclasses.dataclass
        class Rated:
            score: float

        return [Rated(float(self._order.index(candidate))) for candidate in candidates]


def test_the_cost_model_rates_for_tvm_and_learns_from_it(product: Workload, schedules: Sequence[Config]) -> None:
    from tvm.s_tir import meta_schedule as ms

    from raftune.dialects.tvm.lowering.builder import Builder
    from raftune.dialects.tvm.lowering.lower import lower
    from raftune.dialects.tvm.metaschedule import as_metaschedule_cost_model
    from raftune.dialects.tvm.schedule.space import replay
    from raftune.dialects.tvm.target import host_target

    tvm = registry.get("tvm")
    candidates = [registry.candidate(tvm, config) for config in schedules]
    learned: list[tuple[Workload, Candidate, float | None]] = []
    model = as_metaschedule_cost_model(Ranking(candidates[::-1]), [product], lambda *told: learned.append(told))
    lowered = lower(product, Builder())
    context = ms.TuneContext(lowered.function, target=host_target().target)
    proposed = [
        ms.MeasureCandidate(
            replay(lowered, host_target(), config["trace"]), ms.arg_info.ArgInfo.from_prim_func(lowered.function)
        )
        for config in schedules
    ]
    scores = model.predict(context, proposed)
    assert scores == pytest.approx(np.exp([-2.0, -1.0, 0.0]))
    failed, ran = ms.runner.RunnerResult(None, "no"), ms.runner.RunnerResult([3e-6, 1e-6, 2e-6], None)
    model.update(context, proposed[:2], [failed, ran])
    assert learned == [(product, candidates[0], None), (product, candidates[1], pytest.approx(2e-6))]
