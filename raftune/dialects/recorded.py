"""Stands in for a dialect in a simulation: its candidates are those that a log recorded, and nothing is ever built."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence

from raftune.dialects.base import BuildError, Dialect, Kernel
from raftune.workload import Candidate, Config, Workload, canonical_json


class RecordedDialect(Dialect):
    """Made by :func:`recorded_dialect`, as a dialect's name belongs to its class."""

    def __init__(
        self,
        version: str,
        listed: Mapping[str, Sequence[Config]],
        sampled: Mapping[str, Sequence[Config]],
        installed: Dialect | None,
    ) -> None:
        self._version = version
        self._installed = installed
        self._listed = listed
        self._sampled = sampled
        self._values: dict[str, frozenset[str]] = {}

    def version(self) -> str:
        return self._version

    def supports(self, workload: Workload) -> bool:
        return workload.digest in self._listed or workload.digest in self._sampled

    def candidates(self, workload: Workload) -> Sequence[Config]:
        return self._listed.get(workload.digest, ())

    def sample(self, workload: Workload, count: int, seed: int) -> Sequence[Config]:
        recorded = self._sampled.get(workload.digest, ())
        return random.Random(seed).sample(list(recorded), min(count, len(recorded)))

    def vary(self, workload: Workload, parents: Sequence[Config], count: int, seed: int) -> Sequence[Config]:
        """Those recorded that differ in the fewest of their values from one of ``parents``."""
        origins = {self._values_of(parent) for parent in parents}
        others = [config for config in self._sampled.get(workload.digest, ()) if self._values_of(config) not in origins]
        random.Random(seed).shuffle(others)
        return sorted(others, key=lambda config: min(len(self._values_of(config) ^ origin) for origin in origins))[:count]

    def _values_of(self, config: Config) -> frozenset[str]:
        """Every place in the config with its value."""
        text = canonical_json(dict(config))
        if text not in self._values:
            self._values[text] = frozenset(_places(config, ""))
        return self._values[text]

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        return {} if self._installed is None else self._installed.features(workload, config)

    def build(self, workload: Workload, config: Config) -> Kernel:
        raise BuildError(f"{self.name} is a recording: {workload.op} with config {dict(config)!r:.100} cannot be built from it")


def recorded_dialect(
    name: str, priority: int, candidates: Mapping[Workload, Sequence[Candidate]], installed: Dialect | None
) -> RecordedDialect:
    """The dialect ``name`` as it was recorded, all of one version; a workload's default is the first of its candidates.

    What the ``installed`` dialect, if there is one, would list is listed; the rest is what it once sampled.
    """
    listed: dict[str, list[Config]] = {}
    sampled: dict[str, list[Config]] = {}
    version = ""
    for workload, recorded in candidates.items():
        lists = installed.candidates(workload) if installed is not None and installed.supports(workload) else ()
        texts = {canonical_json(dict(config)) for config in lists}
        for position, candidate in enumerate(recorded):
            version = candidate.version
            is_listed = installed is None or position == 0 or candidate.canonical_config in texts
            (listed if is_listed else sampled).setdefault(workload.digest, []).append(candidate.config)
    cls = type(f"Recorded_{name}", (RecordedDialect,), {"name": name, "priority": priority})
    dialect: RecordedDialect = cls(version, listed, sampled, installed)
    return dialect


def _places(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _places(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            yield from _places(part, f"{path}.{position}")
    else:
        yield f"{path}={json.dumps(value)}"
