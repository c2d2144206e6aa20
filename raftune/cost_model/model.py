"""The cost model: gradient-boosted trees that rank the candidates of a workload across dialects.

The target is the logarithm of a candidate's time over the default's time for the same workload and device, so that workloads
of all sizes are comparable. A small ensemble (each member leaves out its share of the *workloads*) gives mean and spread; the
error on the workloads left out adds what the spread does not know. A classifier gives the probability that a candidate runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raftune.cost_model import store
from raftune.cost_model.dataset import Describe, Describer, Sample, samples
from raftune.cost_model.errors import NotEnoughData
from raftune.cost_model.features import Encoder, Matrix, config_names
from raftune.device import Device
from raftune.log import TrainingRow
from raftune.workload import Candidate, Workload

Vector = npt.NDArray[np.float64]

PRIOR_STD = 0.5
"""Standard deviation of a prediction about which nothing was learned: a factor of 1.6 either way."""

MIN_SAMPLES = 8
"""Below this there is nothing to learn from."""

_MEMBERS = 5
_ROUNDS = 120
_PARAMETERS: dict[str, Any] = {
    "tree_method": "hist",
    "max_depth": 7,
    "eta": 0.12,
    "min_child_weight": 1.0,
    "subsample": 0.9,
    "colsample_bytree": 0.4,
    "max_bin": 64,
    "nthread": 1,
    "verbosity": 0,
}
# A candidate e times slower than the fastest of its workload weighs this power of 1/e.
_FOCUS = 0.5
# How many unseen-workload errors of one dialect weigh as much as the error of all.
_SHRINKAGE = 10.0
# No prediction is surer than timings repeat.
_LEAST_STD = 0.01
# One-sided 95% bound of a normal distribution.
_BOUND = 1.645
_MIN_OK = 0.9
# What is chosen unmeasured: with these, on the recorded data set, no choice loses; see docs/search.md.
_CAUTION = 2.0
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Prediction:
    """``log_ratio``: log of candidate time over default time if it runs; ``std``: of that; ``ok``: probability that it runs.

    ``spread`` is the part of ``std`` in which the members of the ensemble disagree: large for what is like nothing seen before.
    """

    log_ratio: float
    std: float
    ok: float = 1.0
    spread: float = PRIOR_STD

    @property
    def score(self) -> float:
        """What candidates are ranked by, lowest first: a failure costs as much as being eight times slower."""
        return self.log_ratio + (1.0 - self.ok) * math.log(8.0)

    @property
    def ratio(self) -> float:
        """Candidate time over default time, the median of what is expected."""
        return math.exp(self.log_ratio)

    @property
    def ratio_high(self) -> float:
        """One-sided 95% upper bound of the ratio."""
        return math.exp(self.log_ratio + _BOUND * self.std)

    @property
    def ratio_low(self) -> float:
        """One-sided 95% lower bound of the ratio."""
        return math.exp(self.log_ratio - _BOUND * self.std)

    @property
    def faster(self) -> float:
        """Probability that the candidate runs and beats the default."""
        return self.ok * 0.5 * math.erfc(self.log_ratio / (self.std * math.sqrt(2.0)))


class CostModel:
    """Deterministic for equal rows and ``seed``. Before :meth:`fit` predictions are a prior: the order of the candidates.

    ``device`` is what is predicted for where no other is named; by default the device of most rows. ``describe`` gives a
    dialect's own features of a candidate, by default those of the installed dialects; models that are given one
    :class:`Describer` share what it computed.
    """

    def __init__(self, *, seed: int = 0, device: Device | None = None, describe: Describe | Describer | None = None) -> None:
        self.seed = seed
        self.device = device
        self._features = describe if isinstance(describe, Describer) else Describer(describe)
        self._fitted: store.Fitted | None = None

    @property
    def is_fitted(self) -> bool:
        return self._fitted is not None

    def fit(self, rows: Iterable[TrainingRow]) -> CostModel:
        """Learn from the log's rows, forgetting what was learned before.

        Raises :class:`NotEnoughData`, and predicts the prior again, with fewer than :data:`MIN_SAMPLES` timed candidates that
        have a timed default, or with nothing that tells them apart.
        """
        return self.fit_samples(samples(rows))

    def fit_samples(self, data: Sequence[Sample]) -> CostModel:
        """As :meth:`fit`, for rows that were prepared already."""
        self._fitted = None
        timed = [s for s in data if s.log_ratio is not None]
        if len(timed) < MIN_SAMPLES:
            raise NotEnoughData(
                f"{len(timed)} timed candidates with a timed default are too few to learn from, {MIN_SAMPLES} are needed: "
                "tune something first"
            )
        described = [self._features(s.workload, s.candidate, s.device) for s in data]
        encoder, matrix = Encoder.learn(described)
        if not encoder.columns:
            raise NotEnoughData("nothing tells the measured candidates apart: tune something else first")
        is_timed = np.array([s.log_ratio is not None for s in data])
        target = np.array([s.log_ratio for s in timed], dtype=np.float64)
        members, errors = self._fit_ensemble(matrix[is_timed], target, timed)
        self.device = self.device or _most_common_device(data)
        self._fitted = store.Fitted(
            columns=encoder.columns,
            members=tuple(members),
            runs=self._fit_runs(matrix, is_timed),
            residuals=_residuals(errors, timed),
            samples=len(data),
            seed=self.seed,
            device=self.device,
        )
        return self

    def predict(self, workload: Workload, candidates: Sequence[Candidate], *, device: Device | None = None) -> list[Prediction]:
        """One prediction a candidate, in order.

        A dialect of which the rows knew nothing but the default, and every dialect before the first fit, gets the prior: as
        fast as the default, a little slower for each place in the order given, with :data:`PRIOR_STD`. A config that says
        something new (a name or a word that no row had) is at least as uncertain as the prior.
        """
        prior = [Prediction(0.01 * place, PRIOR_STD) for place in range(len(candidates))]
        fitted = self._fitted
        if fitted is None or not candidates:
            return prior
        where = device or self.device
        described = [self._features(workload, c, where) for c in candidates]
        matrix = Encoder(fitted.columns).encode(described)
        values = np.stack([_inplace_predict(member, matrix) for member in fitted.members])
        runs = np.ones(len(candidates)) if fitted.runs is None else _inplace_predict(fitted.runs, matrix)
        mean, spread = values.mean(axis=0), values.std(axis=0)
        known = frozenset(fitted.columns)
        predictions = []
        for i, candidate in enumerate(candidates):
            residual, apart = fitted.residuals.get(candidate.dialect), float(spread[i])
            if residual is None:
                predictions.append(prior[i])
                continue
            if not known.issuperset(config_names(candidate, described[i])):
                residual, apart = max(residual, PRIOR_STD), max(apart, PRIOR_STD)
            predictions.append(Prediction(float(mean[i]), math.hypot(apart, residual), float(runs[i]), apart))
        return predictions

    def choose(
        self, workload: Workload, candidates: Sequence[Candidate], *, device: Device | None = None
    ) -> tuple[Candidate, Prediction] | None:
        """A candidate for a workload that was never measured, with what is predicted of it; or ``None``.

        ``candidates[0]`` is the default. Another is named only if it is likely to run, and predicted to beat the default by a
        margin and more than twice what the ensemble disagrees about.
        """
        if self._fitted is None:
            return None
        best: tuple[Candidate, Prediction] | None = None
        predictions = self.predict(workload, candidates, device=device)
        for candidate, p in list(zip(candidates, predictions, strict=True))[1:]:
            if p.ok < _MIN_OK or candidate.dialect not in self._fitted.residuals or _cautious(p) >= 0.0:
                continue
            if best is None or _cautious(p) < _cautious(best[1]):
                best = (candidate, p)
        return best

    def save(self, path: Path) -> None:
        """Write the model as one JSON file, atomically. Raises ``OSError``; an unfitted model raises :class:`NotEnoughData`."""
        if self._fitted is None:
            raise NotEnoughData("a cost model that was not fitted cannot be saved")
        store.save(self._fitted, path)

    @classmethod
    def load(cls, path: Path, *, describe: Describe | None = None) -> CostModel | None:
        """The stored model; ``None`` if there is none, or (with one :class:`CostModelWarning`) if it cannot be used here."""
        fitted = store.load(path)
        if fitted is None:
            return None
        model = cls(seed=fitted.seed, device=fitted.device, describe=describe)
        model._fitted = fitted
        return model

    @classmethod
    def load_beside(cls, log_path: Path, *, describe: Describe | None = None) -> CostModel | None:
        """The model stored beside a tuning log, as :meth:`load`."""
        return cls.load(model_path(log_path), describe=describe)

    def save_beside(self, log_path: Path) -> None:
        """Store the model beside a tuning log, as :meth:`save`."""
        self.save(model_path(log_path))

    def _fit_ensemble(self, matrix: Matrix, target: Vector, timed: Sequence[Sample]) -> tuple[list[Any], Vector]:
        import xgboost

        names = sorted({s.workload.digest for s in timed})
        number = {digest: i for i, digest in enumerate(names)}
        owner = np.array([number[s.workload.digest] for s in timed])
        # A workload with many candidates must not drown the others.
        weight = 1.0 / np.sqrt(np.bincount(owner))[owner]
        # What is asked for is the fastest: how much slower the slow ones are matters less.
        fastest = np.full(len(names), np.inf)
        np.minimum.at(fastest, owner, target)
        weight *= np.exp(_FOCUS * (fastest[owner] - target))
        weight /= weight.mean()
        order = np.random.default_rng(self.seed).permutation(len(names))
        members: list[Any] = []
        errors = np.full(len(timed), np.nan)
        for member in range(_MEMBERS):
            # A single workload cannot be left out; with fewer workloads than members some members see everything.
            outside = np.isin(owner, order[member::_MEMBERS] if len(names) > 1 else ())
            data = xgboost.DMatrix(matrix[~outside], label=target[~outside], weight=weight[~outside], nthread=1)
            parameters = _PARAMETERS | {"objective": "reg:squarederror", "seed": self.seed * _MEMBERS + member}
            booster = xgboost.train(parameters, data, num_boost_round=_ROUNDS)
            members.append(booster)
            if outside.any():
                errors[outside] = _inplace_predict(booster, matrix[outside]) - target[outside]
        return members, errors

    def _fit_runs(self, matrix: Matrix, ran: npt.NDArray[np.bool_]) -> Any | None:
        if ran.all():
            return None
        import xgboost

        data = xgboost.DMatrix(matrix, label=ran.astype(np.float64), nthread=1)
        parameters = _PARAMETERS | {"objective": "binary:logistic", "seed": self.seed, "max_depth": 4}
        return xgboost.train(parameters, data, num_boost_round=_ROUNDS // 2)


def _cautious(prediction: Prediction) -> float:
    """What the logarithm of the ratio may be as well."""
    return prediction.log_ratio + _CAUTION * prediction.spread + _MARGIN


def model_path(log_path: Path) -> Path:
    """Where the model of a log is stored: beside it, as SQLite's own side files are."""
    return log_path.with_name(f"{log_path.name}-model.json")


def _inplace_predict(booster: Any, matrix: Matrix) -> Vector:
    return np.asarray(booster.inplace_predict(matrix), dtype=np.float64)


def _residuals(errors: Vector, timed: Sequence[Sample]) -> dict[str, float]:
    """Root mean square error on unseen workloads by dialect, drawn towards that of all; the prior where none was left out.

    The default does not count: that its ratio is one is no knowledge of its dialect.
    """
    squares: dict[str, list[float]] = {s.candidate.dialect: [] for s in timed if not s.is_default}
    for sample, error in zip(timed, errors, strict=True):
        if not math.isnan(error) and not sample.is_default:
            squares[sample.candidate.dialect].append(float(error) ** 2)
    everything = [square for values in squares.values() for square in values]
    overall = float(np.mean(everything)) if everything else PRIOR_STD**2
    return {
        dialect: max(_LEAST_STD, math.sqrt((sum(values) + _SHRINKAGE * overall) / (len(values) + _SHRINKAGE)))
        for dialect, values in sorted(squares.items())
    }


def _most_common_device(data: Sequence[Sample]) -> Device | None:
    counts: dict[str, int] = {}
    devices: dict[str, Device] = {}
    for sample in data:
        if sample.device is not None:
            counts[sample.device_digest] = counts.get(sample.device_digest, 0) + 1
            devices[sample.device_digest] = sample.device
    return devices[max(sorted(counts), key=counts.__getitem__)] if counts else None
