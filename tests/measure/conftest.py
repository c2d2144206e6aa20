"""A tuner's surroundings with a misbehaving third-party dialect installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raftune.dialects import registry
from raftune.graph.workloads import workload_from_call
from raftune.measurement import Policy
from raftune.workload import Workload


@pytest.fixture(scope="session")
def hostile_paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Folders that, put on the import path, install the dialect as a distribution with an entry point."""
    site = tmp_path_factory.mktemp("site")
    info = site / "hostile-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[raftune.dialects]\nhostile = hostile_dialect:HostileDialect\n")
    paths = [str(site), str(Path(__file__).parent / "hostile")]
    sys.path[:0] = paths
    registry.installed.cache_clear()
    yield paths
    for path in paths:
        sys.path.remove(path)
    registry.installed.cache_clear()


@pytest.fixture(scope="session")
def relu() -> Workload:
    return workload_from_call(torch.ops.aten.relu.default, (torch.randn(8, 16),))


@pytest.fixture(scope="session")
def short_policy() -> Policy:
    return Policy(min_repeats=3, max_repeats=50, max_seconds=0.05, rematch_rounds=7, timeout=20.0, memory_limit_mb=1500)
