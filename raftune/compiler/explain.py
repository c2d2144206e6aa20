"""Why a plan is what it is: for every node what runs there, and for one node all that could, measured or predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.fx

from raftune.compiler.cover import saving_us
from raftune.compiler.selector import Choice, Selector
from raftune.dialects import registry
from raftune.graph import Region
from raftune.measurement import Policy, Status
from raftune.workload import Candidate, Workload

Source = Literal["measured", "predicted", "failed"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One candidate of a workload. ``ratio`` is its time over the default's; ``low`` and ``high`` bound it with 90% confidence.

    A candidate that was measured and beat the default again in a rematch has the rematch's ratio. One that failed has
    ``note`` only.
    """

    candidate: Candidate
    source: Source
    ratio: float | None
    low: float | None = None
    high: float | None = None
    time_us: float | None = None
    is_default: bool = False
    chosen: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"candidate": asdict(self.candidate)}


@dataclass(frozen=True, slots=True)
class Unit:
    """A region of the plan, or one that was considered. ``saving_us`` is of one run as one unit, over its operators apart."""

    nodes: tuple[str, ...]
    workload: Workload
    choice: Choice
    chosen: bool
    saving_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": list(self.nodes),
            "op": self.workload.op,
            "digest": self.workload.digest,
            "dialect": self.choice.dialect,
            "config": self.choice.config,
            "time_us": self.choice.time_us,
            "provenance": self.choice.provenance,
            "confidence": self.choice.confidence,
            "chosen": self.chosen,
            "saving_us": self.saving_us,
        }


def units(regions: Iterable[Region], selector: Selector) -> list[Unit]:
    """The plan's regions in the order of the graph."""
    return [_unit(region, selector, chosen=True) for region in sorted(regions, key=lambda r: r.nodes[0]._sort_key)]


def considered(node: torch.fx.Node, regions: Sequence[Region], proposals: Sequence[Region], selector: Selector) -> list[Unit]:
    """Every region that ``node`` could be part of, the plan's first and then by what they save."""
    taken = {frozenset(region.nodes) for region in regions}
    candidates = {frozenset(r.nodes): r for r in (*regions, *proposals) if node in r.nodes}
    found = [_unit(region, selector, chosen=nodes in taken) for nodes, region in candidates.items()]
    return sorted(found, key=lambda unit: (not unit.chosen, -(unit.saving_us or 0.0), len(unit.nodes)))


def alternatives(workload: Workload, selector: Selector, policy: Policy | None = None) -> list[Alternative]:
    """Every candidate that the log or the dialects know for a workload, fastest first, failures last."""
    policy = policy or Policy()
    log, device = selector.log, selector.device
    outcomes = {} if log is None else log.outcomes(workload, device, policy)
    rematches = {} if log is None else log.rematches(workload, device, policy)
    default = registry.default_candidate(workload)
    default_us = next((o.time_us for c, o in outcomes.values() if c == default), None)
    chosen = selector.choose(workload).candidate
    found: list[Alternative] = []
    ratios: tuple[float | None, float | None, float | None]
    for digest, (candidate, outcome) in outcomes.items():
        whose = (candidate == default, candidate == chosen)
        if outcome.status is not Status.OK or outcome.time_us is None:
            note = ": ".join(filter(None, (outcome.status.value, outcome.message)))
            found.append(Alternative(candidate, "failed", None, None, None, None, *whose, note))
            continue
        rematch = rematches[digest][1] if digest in rematches else None
        if rematch is not None and rematch.ratio is not None:
            ratios = (rematch.ratio, None, rematch.ratio_high)
        else:
            ratios = (_over(outcome.time_us, default_us), _over(outcome.low_us, default_us), _over(outcome.high_us, default_us))
        found.append(Alternative(candidate, "measured", *ratios, outcome.time_us, *whose))
    known = {candidate.digest for candidate, _ in outcomes.values()}
    unmeasured = [c for c in registry.candidates(workload) if c.digest not in known]
    predictions = selector.predictions(workload, [default, *unmeasured]) if unmeasured else None
    for candidate, p in zip(unmeasured, predictions[1:] if predictions else (), strict=False):
        ratios = (p.ratio, p.ratio_low, p.ratio_high)
        time_us = None if default_us is None else default_us * p.ratio
        found.append(Alternative(candidate, "predicted", *ratios, time_us, candidate == default, candidate == chosen))
    return sorted(found, key=lambda a: (a.ratio is None, a.ratio or 0.0))


def _unit(region: Region, selector: Selector, *, chosen: bool) -> Unit:
    saving = saving_us(region, selector) if len(region.nodes) > 1 and not selector.followed else None
    names = tuple(node.name for node in region.nodes)
    return Unit(names, region.workload, selector.choose(region.workload), chosen, saving)


def _over(us: float | None, default_us: float | None) -> float | None:
    return None if us is None or not default_us else us / default_us
