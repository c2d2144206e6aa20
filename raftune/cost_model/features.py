"""What the cost model sees: named numbers of a workload, a device and a candidate, and their encoding as a matrix.

Names are stable within :data:`FEATURE_SCHEMA`; a stored model carries the schema and its own list of columns. A feature that a
row does not have is missing (NaN), which XGBoost handles as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raftune.cost_model import flops
from raftune.device import Device
from raftune.workload import Candidate, TensorSpec, Workload

FEATURE_SCHEMA = 2

Features = dict[str, float]
Matrix = npt.NDArray[np.float32]

# A stranger's config may be of any size: what is looked at, and how much a model remembers.
_MAX_CONFIG_ENTRIES = 64
_MAX_CONFIG_DEPTH = 4
_MAX_COLUMNS = 512
_INPUTS = 4
_DIMENSIONS = 4


def workload_features(workload: Workload) -> Features:
    """Operator families, sizes (log2), arithmetic intensity, and layout, dtype and dimensions of the first few inputs."""
    operations, moved = flops.flops(workload), flops.bytes_moved(workload)
    found: Features = {
        "operators": float(len(workload.operators)),
        "inputs": float(len(workload.inputs)),
        "results": float(len(workload.results)),
        "mutates": float(len(workload.mutates)),
        "log_flops": _log2(operations),
        "log_bytes": _log2(moved),
        "intensity": _log2(operations) - _log2(moved),
        "log_largest": _log2(max((spec.numel for spec in workload.inputs), default=0)),
        "constants": float(sum(spec.constant for spec in workload.inputs)),
    }
    for family, count in Counter(flops.family_of(o.op) for o in workload.operators).items():
        found[f"family={family}"] = float(count)
    if len(workload.operators) == 1:
        found[f"op={flops.base_name(workload.op)}"] = 1.0
    for number, spec in enumerate(workload.inputs[:_INPUTS]):
        found |= _spec_features(f"in{number}", spec)
    for number, spec in enumerate(workload.results[:1]):
        found |= _spec_features(f"out{number}", spec)
    sizes = flops.product_sizes(workload)
    if sizes is not None:
        for name, size in zip(("batch", "m", "n", "k"), sizes, strict=True):
            found[f"product.{name}"] = _log2(size)
            found[f"product.{name}.align"] = _alignment(size)
        found["product.skinny"] = _log2(max(sizes[1:])) - _log2(min(sizes[1:]))
    return found


def device_features(device: Device) -> Features:
    found: Features = {"device.cores": float(device.cores), "device.threads": float(device.threads)}
    return found | {f"device.{flag}": 1.0 for flag in device.vector}


def candidate_features(candidate: Candidate, extra: Mapping[str, float]) -> Features:
    """The dialect, every number and short text in the config, and ``extra``: the dialect's own features of the config."""
    name = candidate.dialect
    found: Features = {f"dialect={name}": 1.0}
    for number, (path, value) in enumerate(_flatten(candidate.config, "", 0)):
        if number == _MAX_CONFIG_ENTRIES:
            break
        if isinstance(value, str):
            found[f"{name}:{path}={value[:40]}"] = 1.0
        elif value is not None:
            found[f"{name}:{path}"] = _finite(value)
    return found | {f"{name}::{key}": _finite(value) for key, value in extra.items()}


def config_names(candidate: Candidate, features: Features) -> Iterator[str]:
    """The names among ``features`` that come from the candidate's config or from its dialect's description of it."""
    prefix = f"{candidate.dialect}:"
    return (name for name in features if name.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Encoder:
    """An ordered list of columns; everything else that a row has is not looked at."""

    columns: tuple[str, ...]

    @staticmethod
    def learn(rows: Sequence[Features]) -> tuple[Encoder, Matrix]:
        """The columns of ``rows`` that tell at least one row from another, and ``rows`` encoded with them.

        If there are too many names, the most frequent ones are looked at.
        """
        counts: Counter[str] = Counter()
        for row in rows:
            counts.update(row.keys())
        frequent = sorted(counts, key=lambda name: (-counts[name], name))[:_MAX_COLUMNS]
        matrix = Encoder(tuple(sorted(frequent))).encode(rows)
        # NaN, for a row without the feature, differs from every value.
        telling = (matrix != matrix[0]).any(axis=0)
        names = np.array(sorted(frequent))[telling]
        return Encoder(tuple(str(name) for name in names)), matrix[:, telling]

    def encode(self, rows: Sequence[Features]) -> Matrix:
        """A float32 matrix, one row a mapping, one column a name, NaN where missing."""
        index = {name: column for column, name in enumerate(self.columns)}
        matrix = np.full((len(rows), len(self.columns)), np.nan, dtype=np.float32)
        for number, row in enumerate(rows):
            for name, value in row.items():
                column = index.get(name)
                if column is not None:
                    matrix[number, column] = value
        return matrix


def _spec_features(name: str, spec: TensorSpec) -> Features:
    found = {
        f"{name}.layout={layout_of(spec)}": 1.0,
        f"{name}.bytes": float(flops.item_bytes(spec.dtype)),
        f"{name}.float": float("float" in spec.dtype),
        f"{name}.rank": float(len(spec.shape)),
        f"{name}.log_numel": _log2(spec.numel),
    }
    for back, size in enumerate(reversed(spec.shape[-_DIMENSIONS:])):
        found[f"{name}.dim-{back + 1}"] = _log2(size)
    return found


def layout_of(spec: TensorSpec) -> str:
    """``contiguous``, ``transposed`` (last two dimensions), ``channels_last``, ``expanded`` (a stride of zero) or ``other``."""
    if spec.is_contiguous:
        return "contiguous"
    pairs = list(zip(spec.shape, spec.stride, strict=True))
    if any(stride == 0 and size > 1 for size, stride in pairs):
        return "expanded"
    if _moved(spec, [*range(len(pairs) - 2), len(pairs) - 1, len(pairs) - 2]):
        return "transposed"
    if len(pairs) >= 3 and _moved(spec, [0, *range(2, len(pairs)), 1]):
        return "channels_last"
    return "other"


def _moved(spec: TensorSpec, order: Sequence[int]) -> bool:
    if len(spec.shape) < 2:
        return False
    shape, stride = (tuple(values[i] for i in order) for values in (spec.shape, spec.stride))
    return TensorSpec(spec.dtype, shape, stride).is_contiguous


def _flatten(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    # Lists in lists are programs, such as traces: what they say is for their dialect to tell.
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value):
        return
    if isinstance(value, Mapping | list | tuple):
        if depth < _MAX_CONFIG_DEPTH:
            items: Iterable[tuple[Any, Any]] = sorted(value.items()) if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                yield from _flatten(item, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, value


def _finite(value: float) -> float:
    # A float32 column: an integer beyond its range is as good as its largest.
    limit = float(np.finfo(np.float32).max)
    number = min(max(value, -limit), limit)
    return float(number)


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else -1.0


def _alignment(size: int) -> float:
    """Largest power of two, at most 64, that divides ``size``, as its logarithm."""
    return _log2(math.gcd(size, 64)) if size else 6.0
