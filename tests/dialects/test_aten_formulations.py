"""Every formulation of the aten dialect against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftune.dialects.aten import AtenDialect
from raftune.dialects.base import Kernel
from raftune.workload import Workload

Check = Callable[[Workload, Kernel], None]
aten = AtenDialect()


@pytest.mark.parametrize("family", ["mm", "addmm", "bmm", "baddbmm", "conv", "sdpa", "adamw", "sgd"])
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
