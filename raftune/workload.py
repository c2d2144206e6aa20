"""What is tuned: tensor specs, workloads, candidates, and their identity.

A *workload* is a region of the training graph with concrete argument specs. Its digest is the key under which the tuner
records and the compiler looks up, so both must build it through :func:`raftune.graph.workload_of`, and the digest must not
depend on the process, the machine or the Python version: it is SHA-256 over canonical JSON (sorted keys, no white space,
shortest round-trip floats, non-finite floats by name).

Nothing of raftune and nothing of torch is imported here: a log can be read on a machine that has neither.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Config = Mapping[str, Any]


class InvalidRecord(ValueError):
    """Text that should describe a workload or a candidate does not."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a workload: ``shape`` and ``stride`` count elements; ``low`` and ``high`` are inclusive value bounds.

    ``dtype`` is torch's name without the prefix (``float32``). Bounds are given where values matter for validity
    (embedding indices, a variance that must stay positive); ``None`` means any value. ``constant`` marks a tensor whose
    values do not change between calls (a weight at inference).
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    low: float | int | None = None
    high: float | int | None = None
    constant: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; the stride of a dimension of size one does not matter."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class In:
    """The region's input number ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Out:
    """Result number ``index`` of the region's operator number ``node``."""

    node: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Literal:
    """A torch constant that JSON has no word for: ``kind`` is ``dtype``, ``layout``, ``memory_format`` or ``device``."""

    kind: str
    name: str


Arg = In | Out | Literal | None | bool | int | float | str | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """One base operator call; ``op`` is the overload's full name, ``aten.addmm.default``."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()


@dataclass(frozen=True)
class Workload:
    """A region with concrete specs: operators in order, deduplicated inputs, the results that are used outside.

    ``outputs[i]`` says where result ``i`` comes from and ``results[i]`` what it looks like. A kernel for the workload is
    called with one tensor per entry of ``inputs`` and returns the tensors of ``outputs``: bare if there is exactly one,
    else a tuple. ``mutates`` lists the inputs that the region updates in place (an optimizer's parameters and state).
    """

    operators: tuple[Operator, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[Out, ...]
    results: tuple[TensorSpec, ...]
    mutates: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        """The operator's name for a region of one, else the names joined by ``+`` (for people and for features)."""
        return "+".join(operator.op for operator in self.operators)

    @cached_property
    def canonical(self) -> str:
        """Canonical JSON text of the whole workload."""
        return canonical_json(self.to_json())

    @cached_property
    def digest(self) -> str:
        """Stable identity: the first 32 hexadecimal digits of SHA-256 over :attr:`canonical`."""
        return digest_text(self.canonical)

    def to_json(self) -> dict[str, Any]:
        return {
            "operators": [
                {"op": o.op, "args": [_arg_to_json(a) for a in o.args], "kwargs": {k: _arg_to_json(a) for k, a in o.kwargs}}
                for o in self.operators
            ],
            "inputs": [_spec_to_json(s) for s in self.inputs],
            "outputs": [[o.node, o.index] for o in self.outputs],
            "results": [_spec_to_json(s) for s in self.results],
            "mutates": list(self.mutates),
        }

    @staticmethod
    def from_json(value: Any) -> Workload:
        """Rebuild a workload from :meth:`to_json`'s form; raises :class:`InvalidRecord` on anything else."""
        try:
            return Workload(
                operators=tuple(
                    Operator(
                        str(o["op"]),
                        tuple(_arg_from_json(a) for a in o["args"]),
                        tuple(sorted((str(k), _arg_from_json(a)) for k, a in o["kwargs"].items())),
                    )
                    for o in value["operators"]
                ),
                inputs=tuple(_spec_from_json(s) for s in value["inputs"]),
                outputs=tuple(Out(int(n), int(i)) for n, i in value["outputs"]),
                results=tuple(_spec_from_json(s) for s in value["results"]),
                mutates=tuple(int(i) for i in value["mutates"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidRecord(f"not a workload: {error!r}") from error


@dataclass(frozen=True)
class Candidate:
    """One implementation of one workload: a dialect at a version, and a self-describing JSON config."""

    dialect: str
    version: str
    config: Config = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"dialect": self.dialect, "version": self.version, "config": dict(self.config)}

    @cached_property
    def canonical_config(self) -> str:
        return canonical_json(self.config)

    @cached_property
    def digest(self) -> str:
        """Stable identity within a workload: dialect, version and config."""
        return digest_text(canonical_json([self.dialect, self.version, self.config]))

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.digest == other.digest


def canonical_json(value: Any) -> str:
    """JSON text that is equal for equal values everywhere; NaN and infinities must have been named before."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _arg_to_json(arg: Arg) -> Any:
    match arg:
        case In(index):
            return {"in": index}
        case Out(node, index):
            return {"out": [node, index]}
        case Literal(kind, name):
            return {kind: name}
        case tuple():
            return [_arg_to_json(a) for a in arg]
        case float() if not math.isfinite(arg):
            return {"float": repr(arg)}
        case _:
            return arg


def _arg_from_json(value: Any) -> Arg:
    if isinstance(value, list):
        return tuple(_arg_from_json(v) for v in value)
    if not isinstance(value, dict):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"argument {value!r}")
    ((kind, content),) = value.items()
    match kind:
        case "in":
            return In(int(content))
        case "out":
            return Out(int(content[0]), int(content[1]))
        case "float":
            return float(content)
        case "dtype" | "layout" | "memory_format" | "device":
            return Literal(kind, str(content))
    raise ValueError(f"argument {value!r}")


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    value: dict[str, Any] = {"dtype": spec.dtype, "shape": list(spec.shape), "stride": list(spec.stride)}
    if spec.low is not None:
        value["low"] = spec.low
    if spec.high is not None:
        value["high"] = spec.high
    if spec.constant:
        value["constant"] = True
    return value


def _spec_from_json(value: Any) -> TensorSpec:
    return TensorSpec(
        dtype=str(value["dtype"]),
        shape=tuple(int(n) for n in value["shape"]),
        stride=tuple(int(n) for n in value["stride"]),
        low=value.get("low"),
        high=value.get("high"),
        constant=bool(value.get("constant", False)),
    )
