"""Candidates compiled on one machine to be measured on another: a folder of libraries with a manifest that describes them.

The folder is complete by itself: what it holds loads where there is no compiler. Packing can be stopped and gone on with.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from raftune.cost_model.flops import flops
from raftune.device import Device, targeting
from raftune.dialects import registry, store
from raftune.dialects.base import BuildError, Dialect
from raftune.graph import Task
from raftune.search import Budget
from raftune.workload import Candidate, InvalidRecord, Workload

_FORMAT = 1
# So many are compiled between two looks at the clock; the manifest is written as often.
_CHUNK = 16

Progress = Callable[[int, int, int], None]
"""Told how many candidates are in the pack, how many failed, and how many there are in all."""


class PackError(RuntimeError):
    """A folder that should hold packed candidates does not, or cannot be written to."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A candidate in a pack, for a task of that weight."""

    workload: Workload
    weight: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Pack:
    """What a folder holds. ``failed`` maps the digests of workload and candidate to why it could not be built."""

    folder: Path
    device: Device
    entries: tuple[Packed, ...] = ()
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def kernels(self) -> Path:
        return self.folder / "kernels"


@dataclass(frozen=True, slots=True)
class PackReport:
    """Candidates in the pack, of how many tasks; how many were left for want of budget; messages of failures, counted."""

    packed: int
    tasks: int
    left_out: int
    failures: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build_pack(
    tasks: Sequence[Task],
    device: Device,
    folder: Path,
    budget: Budget,
    *,
    dialects: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Compile the most promising candidates of every task, the heaviest tasks first, until ``budget`` is spent.

    Only dialects that compile (:meth:`Dialect.prepare`) have anything to pack. What ``folder`` holds already, for the same
    device, is kept. Raises :class:`PackError`.
    """
    started = time.monotonic()
    pack = _opened(folder, device)
    chosen = registry.with_dialects(dialects) if dialects else nullcontext()
    with targeting(device), chosen, store.folder_is(pack.kernels):
        planned = list(_in_turns(tasks))
        done = {(entry.workload.digest, entry.candidate.digest) for entry in pack.entries} | set(pack.failed)
        missing = [entry for entry in planned if (entry.workload.digest, entry.candidate.digest) not in done]
        entries, failed, tried = list(pack.entries), dict(pack.failed), 0
        while missing and not _is_spent(budget, time.monotonic() - started, len(entries)):
            room = _CHUNK if budget.trials is None else min(_CHUNK, budget.trials - len(entries))
            chunk, missing = missing[:room], missing[room:]
            for entry, error in zip(chunk, _prepare(chunk), strict=True):
                if error is None:
                    entries.append(entry)
                else:
                    failed[entry.workload.digest, entry.candidate.digest] = " ".join(str(error).split())
            tried += len(chunk)
            pack = Pack(folder, device, tuple(entries), failed)
            _write(pack)
            if progress is not None:
                progress(len(entries), len(failed), len(planned))
        if not tried:
            _write(pack)
    counts = dict(Counter(failed.values()).most_common(5))
    return PackReport(len(pack.entries), len({entry.workload for entry in pack.entries}), len(missing), counts)


def read_pack(folder: Path) -> Pack:
    """The pack in ``folder``, whose manifest may be a stranger's. Raises :class:`PackError`."""
    path = folder / "manifest.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != _FORMAT:
            raise PackError(f"{path} has format {value['format']!r}, this raftune reads {_FORMAT}")
        device = value["device"]
        return Pack(
            folder=folder,
            device=Device(
                str(device["kind"]),
                str(device["model"]),
                int(device["cores"]),
                tuple(map(str, device["vector"])),
                int(device["threads"]),
            ),
            entries=tuple(
                Packed(Workload.from_json(e["workload"]), int(e["weight"]), _candidate(e["candidate"]))
                for e in value["entries"]
            ),
            failed={(str(f["workload"]), str(f["candidate"])): str(f["message"]) for f in value["failed"]},
        )
    except FileNotFoundError:
        raise PackError(f"{folder} holds no packed candidates: there is no manifest.json") from None
    except OSError as error:
        raise PackError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, InvalidRecord, RecursionError) as error:
        raise PackError(f"{path} does not describe packed candidates: {error!r:.200}") from error


def problems(pack: Pack) -> list[str]:
    """What of the pack does not load on this machine, one line each; needs neither the device nor a compiler."""
    found = []
    with targeting(pack.device), store.folder_is(pack.kernels):
        for entry in pack.entries:
            try:
                registry.load(entry.workload, entry.candidate)
            except (BuildError, registry.UnknownDialect) as error:
                found.append(f"{entry.candidate.dialect} {entry.candidate.canonical_config}: {error}")
    return found


def _opened(folder: Path, device: Device) -> Pack:
    if (folder / "manifest.json").exists():
        pack = read_pack(folder)
        if pack.device != device:
            raise PackError(f"{folder} holds candidates for {pack.device}, not for {device}: choose another folder")
        return pack
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PackError(f"{folder} is not empty and holds no packed candidates: choose another folder")
    except OSError as error:
        raise PackError(f"{folder} cannot be written to: {error.strerror}") from error
    return Pack(folder, device)


def _in_turns(tasks: Sequence[Task]) -> Iterator[Packed]:
    """The first candidate of every task, then the second of every task: whenever the budget ends, each has its best."""
    heaviest = sorted(tasks, key=lambda task: -task.weight * flops(task.workload))
    lists = []
    for task in heaviest:
        found = [c for c in registry.candidates(task.workload) if _compiles(registry.get(c.dialect))]
        lists.append([Packed(task.workload, task.weight, candidate) for candidate in found])
    for row in zip_longest(*lists):
        yield from (entry for entry in row if entry is not None)


def _compiles(dialect: Dialect) -> bool:
    return type(dialect).prepare is not Dialect.prepare


def _is_spent(budget: Budget, seconds: float, packed: int) -> bool:
    return (budget.seconds is not None and seconds >= budget.seconds) or (budget.trials is not None and packed >= budget.trials)


def _prepare(chunk: Sequence[Packed]) -> list[BuildError | None]:
    results: dict[int, BuildError | None] = {}
    for name in dict.fromkeys(entry.candidate.dialect for entry in chunk):
        places = [i for i, entry in enumerate(chunk) if entry.candidate.dialect == name]
        asked = [(chunk[i].workload, chunk[i].candidate.config) for i in places]
        results |= dict(zip(places, registry.get(name).prepare_all(asked), strict=True))
    return [results[i] for i in range(len(chunk))]


def _write(pack: Pack) -> None:
    """Others see the manifest from before or this one, never half of one."""
    value = {
        "format": _FORMAT,
        "device": pack.device.to_json(),
        "entries": [
            {"workload": e.workload.to_json(), "weight": e.weight, "candidate": e.candidate.to_json()} for e in pack.entries
        ],
        "failed": [{"workload": w, "candidate": c, "message": message} for (w, c), message in pack.failed.items()],
    }
    partial = pack.folder / "manifest.json.partial"
    try:
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(pack.folder / "manifest.json")
    except OSError as error:
        raise PackError(f"{pack.folder} cannot be written to: {error.strerror}") from error


def _candidate(value: Any) -> Candidate:
    config = value["config"]
    if not isinstance(config, dict):
        raise TypeError(f"config {config!r}")
    return Candidate(str(value["dialect"]), str(value["version"]), config)
