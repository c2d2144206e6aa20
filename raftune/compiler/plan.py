"""The plan of a step: the choice for each of its workloads, raced as a whole and kept until the log promises a better one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from raftune.compiler.selector import PlannedChoice, Provenance, Selector
from raftune.device import Device
from raftune.graph import Region, TrainingGraph
from raftune.log import TuningLog
from raftune.measure.race import EAGER, RaceResult
from raftune.workload import Candidate, canonical_json, digest_text

logger = logging.getLogger("raftune")

# Winners that came into the log after the race, from another model perhaps, must save this share of the step to be raced for.
_WORTH_A_RACE = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """Choices by workload digest, and how the step that they make did against eager and single compilers."""

    choices: Mapping[str, PlannedChoice]
    race: RaceResult

    @staticmethod
    def of(regions: Sequence[Region], selector: Selector, race: RaceResult) -> Plan:
        """The plan that ``selector`` makes for the regions of a graph, with its race."""
        return Plan(_choices(regions, selector), race)

    def to_json(self) -> dict[str, Any]:
        choices = {
            digest: {
                "dialect": choice.candidate.dialect,
                "version": choice.candidate.version,
                "config": dict(choice.candidate.config),
                "time_us": choice.time_us,
                "provenance": choice.provenance,
                "confidence": choice.confidence,
            }
            for digest, choice in self.choices.items()
        }
        return self.race.to_json() | {"choices": choices}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """Raises ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError`` if ``value`` is not a plan."""
        choices = {str(digest): _planned(choice) for digest, choice in value["choices"].items()}
        return Plan(choices, RaceResult.from_json(value))


def plan_key(graph: TrainingGraph) -> str:
    """Identity of a step in the log: its graph, and the PyTorch that eager ran with."""
    return digest_text(canonical_json([graph.digest, torch.__version__]))


def recommended_plan(graph: TrainingGraph, regions: Sequence[Region], selector: Selector) -> Plan | None:
    """The plan that the log holds for this step and device, unless it has to be raced anew.

    ``regions`` are those of the graph by what the log says now. The plan has to be raced anew if one of its choices cannot be
    built here, or if the log's present winners promise to save enough over it and over what won its race; and after a race that
    eager won, with any other choice.
    """
    log = selector.log
    plan = None if log is None else _stored(plan_key(graph), log, selector.device)
    if plan is None:
        return None
    present = _choices(regions, selector)
    if not present.keys() <= plan.choices.keys():
        return None
    changed = [digest for digest, choice in present.items() if plan.choices[digest].candidate != choice.candidate]
    if not changed or plan.race.winner == EAGER:
        return None if changed else plan
    saved_us = 0.0
    for region in regions:
        digest = region.workload.digest
        if digest not in changed:
            continue
        before, now = plan.choices[digest].time_us, present[digest].time_us
        if before is None or now is None or not selector.usable(region.workload, plan.choices[digest].candidate):
            return None
        saved_us += before - now
    wanted_ms = plan.race.raftune_ms - (1.0 - _WORTH_A_RACE) * plan.race.best_ms
    return plan if saved_us < wanted_ms * 1e3 else None


def _choices(regions: Sequence[Region], selector: Selector) -> dict[str, PlannedChoice]:
    return {region.workload.digest: PlannedChoice.of(selector.choose(region.workload)) for region in regions}


def _planned(value: Mapping[str, Any]) -> PlannedChoice:
    if not isinstance(value["config"], dict):
        raise TypeError(f"the config of a choice must be an object, not {value['config']!r}")
    if value["provenance"] not in get_args(Provenance):
        raise ValueError(f"provenance must be one of {get_args(Provenance)}, not {value['provenance']!r}")
    numbers = [None if value[name] is None else float(value[name]) for name in ("time_us", "confidence")]
    candidate = Candidate(str(value["dialect"]), str(value["version"]), value["config"])
    canonical_json(candidate.config)  # what has no canonical form has no digest
    return PlannedChoice(candidate, numbers[0], value["provenance"], numbers[1])


def _stored(key: str, log: TuningLog, device: Device) -> Plan | None:
    found = log.race(key, device)
    try:
        return None if found is None else Plan.from_json(found)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        logger.warning("raftune: the plan stored in %s is unreadable, racing again", log.path)
        return None
