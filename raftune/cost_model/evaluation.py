"""How good the cost model is, on workloads that it has not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raftune.cost_model.dataset import Describe, Describer, Sample, samples
from raftune.cost_model.errors import NotEnoughData
from raftune.cost_model.model import CostModel
from raftune.log import TrainingRow, TuningLog

# A score over fewer workloads than this says nothing about the next one.
_LEAST = 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Leave-one-workload-out scores, over ``workloads`` that have a choice to make.

    ``top1`` and ``top5``: weighted sum of the best measured times over the weighted sum of the best measured time among the
    first one or five predicted candidates (1.0 is perfect). ``default``: the same for always taking the default. ``regret``:
    mean over workloads of the time of the first predicted candidate over the best time, minus one. A predicted candidate that
    failed when measured costs the default's time, since that is what would run then.

    ``chosen``: the score of what :meth:`CostModel.choose` names, the default where it names none; ``chosen_regret`` as above;
    ``chosen_worst``: the largest time of what it names over the default's, minus one.
    """

    workloads: int
    samples: int
    top1: float
    top5: float
    default: float
    regret: float
    chosen: float
    chosen_regret: float
    chosen_worst: float

    def __str__(self) -> str:
        return (
            f"{self.workloads} workloads left out in turn, {self.samples} candidates: "
            f"top-1 {self.top1:.3f}, top-5 {self.top5:.3f}"
            f" (always the default {self.default:.3f}), mean regret {self.regret:.1%}; "
            f"chosen unmeasured {self.chosen:.3f}, mean regret {self.chosen_regret:.1%}, "
            f"at most {max(self.chosen_worst, 0.0):.1%} slower than the default"
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def evaluate(log: TuningLog, *, seed: int = 0) -> Evaluation:
    """Score a model of the log's own rows; workloads count with the weight of the latest run that had them as tasks."""
    return evaluate_rows(log.training_rows(), weights=log.weights(), seed=seed)


def evaluate_rows(
    rows: Iterable[TrainingRow],
    *,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    describe: Describe | None = None,
) -> Evaluation:
    """Score on ``rows``; ``weights`` by workload digest, 1 where missing. Raises :class:`NotEnoughData`."""
    data = samples(rows)
    digests = sorted({s.workload.digest for s in data})
    scored: list[_Scored] = []
    shared = Describer(describe)
    for held_out in digests:
        inside = [s for s in data if s.workload.digest != held_out]
        groups: dict[str, list[Sample]] = {}
        for sample in data:
            if sample.workload.digest == held_out:
                groups.setdefault(sample.device_digest, []).append(sample)
        choices = [group for group in groups.values() if len(group) > 1]
        if choices and inside:
            model = CostModel(seed=seed, describe=shared).fit_samples(inside)
            scored.extend(_score(model, group, (weights or {}).get(held_out, 1.0)) for group in choices)
    if len(scored) < _LEAST:
        raise NotEnoughData("at least two workloads with several measured candidates are needed: tune something first")
    weight = np.array([s.weight for s in scored])
    names = ("best", "top1", "top5", "default", "chosen")
    best, top1, top5, default, chosen = (np.array([getattr(s, name) for s in scored]) for name in names)
    return Evaluation(
        workloads=len(scored),
        samples=len(data),
        top1=float((weight * best).sum() / (weight * top1).sum()),
        top5=float((weight * best).sum() / (weight * top5).sum()),
        default=float((weight * best).sum() / (weight * default).sum()),
        regret=float((top1 / best - 1.0).mean()),
        chosen=float((weight * best).sum() / (weight * chosen).sum()),
        chosen_regret=float((chosen / best - 1.0).mean()),
        chosen_worst=float((chosen / default - 1.0).max()),
    )


@dataclass(frozen=True, slots=True)
class _Scored:
    weight: float
    best: float
    top1: float
    top5: float
    default: float
    chosen: float


def _score(model: CostModel, group: Sequence[Sample], weight: float) -> _Scored:
    predictions = model.predict(group[0].workload, [s.candidate for s in group], device=group[0].device)
    order = sorted(range(len(group)), key=lambda i: (predictions[i].score, group[i].candidate.digest))
    default_us = group[0].default_us
    times = [group[i].time_us or default_us for i in order]
    best = min(s.time_us for s in group if s.time_us is not None)
    named = model.choose(group[0].workload, [s.candidate for s in sorted(group, key=lambda s: not s.is_default)])
    known = {s.candidate: s.time_us or default_us for s in group}
    chosen_us = default_us if named is None else known[named[0]]
    return _Scored(weight, best, times[0], min(times[:5]), default_us, chosen_us)
