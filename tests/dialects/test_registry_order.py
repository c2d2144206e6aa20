"""Which dialects are found, in which order they are used, and how a third party adds one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftune.dialects import registry
from raftune.dialects.base import BuildError
from raftune.measure.inputs import make_inputs
from raftune.workload import Candidate, Workload

BUILT_IN = {"aten", "onednn", "inductor", "tvm"}


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    registry.installed.cache_clear()
    yield
    registry.installed.cache_clear()


def test_the_built_in_dialects_are_installed_by_priority() -> None:
    found = registry.installed()
    assert set(found) >= BUILT_IN
    priorities = [dialect.priority for dialect in found.values()]
    assert priorities == sorted(priorities, reverse=True)
    assert all(dialect.name == name for name, dialect in found.items())


def test_the_default_comes_first_for_every_workload_and_preference(workloads: dict[str, Workload]) -> None:
    for workload in workloads.values():
        for names in ([], ["onednn"], ["onednn", "aten"]):
            with registry.with_dialects(names):
                candidates = registry.candidates(workload)
            first = candidates[0]
            assert (first.dialect, first.config) == ("aten", {"formulation": "default"})
            assert first == registry.default_candidate(workload)
            assert len(candidates) == len({c.digest for c in candidates})


def test_with_dialects_narrows_and_orders_and_restores() -> None:
    before = [d.name for d in registry.enabled()]
    with registry.with_dialects(["onednn", "aten"]):
        assert [d.name for d in registry.enabled()] == ["onednn", "aten"]
        with registry.with_dialects(["aten", "onednn", "aten"]):
            assert [d.name for d in registry.enabled()] == ["aten", "onednn"]
        assert [d.name for d in registry.enabled()] == ["onednn", "aten"]
    assert [d.name for d in registry.enabled()] == before


def test_an_unknown_dialect_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(registry.UnknownDialect, match=r"'cudnn'.*aten"), registry.with_dialects(["aten", "cudnn"]):
        pass
    with pytest.raises(registry.UnknownDialect, match="installed: "):
        registry.get("nonsense")


def test_a_candidate_of_another_version_is_not_built(workloads: dict[str, Workload]) -> None:
    workload = workloads["add"]
    with pytest.raises(BuildError, match=r"0\.0\.1"):
        registry.build(workload, Candidate("aten", "0.0.1", {"formulation": "default"}))


def test_an_unavailable_dialect_is_listed_with_its_reason_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    row = next(r for r in registry.describe() if r.name == "inductor")
    assert not row.available
    assert "no-such-compiler" in row.reason
    assert "inductor" not in [d.name for d in registry.enabled()]


THIRD_PARTY = """
from raftune.dialects.base import BuildError, Dialect


class TwiceDialect(Dialect):
    name = "twice"
    priority = 1000

    def version(self):
        return "1.5"

    def supports(self, workload):
        return workload.op == "aten.add.Tensor"

    def candidates(self, workload):
        return [{"way": "multiply"}]

    def build(self, workload, config):
        if config != {"way": "multiply"}:
            raise BuildError(f"config {config!r}")
        return lambda x, y: y * 2 + x
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution, as pip would leave it: a module and its metadata with the entry point."""
    (tmp_path / "twice_dialect.py").write_text(THIRD_PARTY)
    info = tmp_path / "twice_dialect-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twice-dialect\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[raftune.dialects]\ntwice = twice_dialect:TwiceDialect\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_a_third_party_dialect_is_found_listed_and_built(third_party: Path, workloads: dict[str, Workload]) -> None:
    workload = workloads["add"]
    assert next(iter(registry.installed())) == "twice"
    assert registry.DialectInfo("twice", "1.5", available=True, reason="") in registry.describe()
    candidate = next(c for c in registry.candidates(workload) if c.dialect == "twice")
    inputs = make_inputs(workload, seed=0)
    kernel, default = registry.build(workload, candidate), registry.build(workload, registry.default_candidate(workload))
    assert (kernel(*inputs) - default(*inputs)).abs().max() < 1e-6
    assert not any(c.dialect == "twice" for c in registry.candidates(workloads["gelu"]))


def test_a_third_party_dialect_that_fails_to_load_takes_no_other_down(third_party: Path) -> None:
    (third_party / "twice_dialect.py").write_text("raise RuntimeError('half installed')\n")
    sys.modules.pop("twice_dialect", None)
    with pytest.warns(UserWarning, match=r"'twice'.*half installed"):
        found = registry.installed()
    assert set(found) >= BUILT_IN
    assert "twice" not in found
