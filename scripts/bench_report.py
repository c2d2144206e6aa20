"""What the rows of the benchmark say: summary, table, and the file that keeps them so that a long benchmark can go on."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_peers import COMPILE, EAGER, KEEP_PAGES, RAFTUNE

Row = Mapping[str, Any]

_HEADINGS = {
    "eager foreach": "foreach",
    "eager fused": "fused",
    KEEP_PAGES: "pages",
    "torchscript": "script",
    COMPILE: "compile",
    "torch.compile max-autotune": "autotune",
    "jax": "jax",
    RAFTUNE: "raftune",
}
_LEGEND = """\
eager: milliseconds of a step, the median; the other contenders: their time over eager's of the same round, the median.
foreach, fused: eager with this optimizer; pages: fused, and an allocator that keeps its pages; script, compile (torch.compile),
autotune (its max-autotune): with both of these. speed-up: raftune over the best other contender. memory: raftune's peak over
eager's; without imports and model in brackets. compile s: raftune / torch.compile. loss: raftune's largest relative difference
from eager's losses in 50 steps."""


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in a file of :func:`save_rows`; none if there is no file. Raises ``ValueError`` if it is another file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    content = json.loads(text)
    rows = content.get("rows") if isinstance(content, dict) else None
    if rows is None:
        raise ValueError(f"{path} does not hold results of this benchmark")
    return list(rows)


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file as a whole: who is killed meanwhile finds the old one."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def left_to_do(cases: Iterable[str], rows: Iterable[Row], threads: int) -> list[str]:
    """The cases without rows for this number of threads."""
    done = {row["case"] for row in rows if row["threads"] == threads}
    return [case for case in cases if case not in done]


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows of one number of threads in a few figures, with the rows.

    ``geomean`` and ``worst``: speed-up of raftune over the best other contender of each case; ``geomean_over_eager`` and
    ``geomean_over_keep_pages``: over these. The worst case of the other figures: ``compile_ratio`` (raftune's compile time over
    torch.compile's), ``peak_ratio`` and ``step_ratio`` (its memory over eager's), ``loss_difference``, and ``measurements``
    (what compiling has added to the log). A figure without a case is ``None``; ``missing`` are the cases without raftune.
    """
    cases = [case for case in _by_case(rows).values() if _timed(case, RAFTUNE) and _timed(case, EAGER)]
    speed_ups = [speed_up(case) for case in cases]
    return {
        "geomean": _geomean(speed_ups),
        "worst": min(speed_ups, default=None),
        "geomean_over_eager": _geomean([1 / case[RAFTUNE]["ratio"] for case in cases]),
        "geomean_over_keep_pages": _geomean([v for case in cases if (v := _quotient(case, "ratio", KEEP_PAGES, RAFTUNE))]),
        "cases": len(cases),
        "missing": sorted(_by_case(rows).keys() - {case[RAFTUNE]["case"] for case in cases}),
        "compile_ratio": max((v for case in cases if (v := _quotient(case, "compile_s", RAFTUNE, COMPILE))), default=None),
        "peak_ratio": max((case[RAFTUNE]["peak_mb"] / case[EAGER]["peak_mb"] for case in cases), default=None),
        "step_ratio": max((case[RAFTUNE]["step_mb"] / case[EAGER]["step_mb"] for case in cases), default=None),
        "loss_difference": max((case[RAFTUNE]["loss_difference"] for case in cases), default=None),
        "measurements": sum(case[RAFTUNE].get("measurements", 0) for case in cases),
        "rows": list(rows),
    }


def best_peer(case: Mapping[str, Row]) -> str:
    """The fastest contender of a case that is not raftune."""
    return min((name for name in case if name != RAFTUNE and _timed(case, name)), key=lambda name: case[name]["ratio"])


def speed_up(case: Mapping[str, Row]) -> float:
    return float(case[best_peer(case)]["ratio"] / case[RAFTUNE]["ratio"])


def table(rows: Sequence[Row]) -> str:
    """A line for each case, the reasons of those that were not timed, and the means."""
    names = [name for name in _HEADINGS if any(row["contender"] == name for row in rows)]
    width = max([len("case"), *(len(row["case"]) for row in rows)])
    heading = f"{'case':{width}} {'eager':>8} " + " ".join(f"{_HEADINGS[name]:>8}" for name in names)
    lines = [f"{heading}  {'best peer':26} {'speed-up':>8} {'memory':>13} {'compile s':>13} {'loss':>8}"]
    lines += [_line(label, case, names, width) for label, case in _by_case(rows).items()]
    reasons = [f"{row['case']}, {row['contender']}: {row['reason']}" for row in rows if "reason" in row]
    summary = summarize(rows)
    figures = [
        f"raftune over the best other contender: {_times(summary['geomean'])} (geometric mean of {summary['cases']} cases), "
        f"worst {_times(summary['worst'])}; over eager {_times(summary['geomean_over_eager'])}, "
        f"over eager that keeps its pages {_times(summary['geomean_over_keep_pages'])}"
    ]
    return "\n".join([*lines, "", _LEGEND, *(["", *reasons] if reasons else []), "", *figures])


def _line(label: str, case: Mapping[str, Row], names: Sequence[str], width: int) -> str:
    eager = f"{case[EAGER]['median_ms']:8.2f}" if _timed(case, EAGER) else f"{'-':>8}"
    ratios = " ".join(f"{case[name]['ratio']:8.3f}" if _timed(case, name) else f"{'-':>8}" for name in names)
    if not (_timed(case, RAFTUNE) and _timed(case, EAGER)):
        return f"{label:{width}} {eager} {ratios}"
    own = case[RAFTUNE]
    memory = f"{own['peak_mb'] / case[EAGER]['peak_mb']:.2f} ({own['step_mb'] / case[EAGER]['step_mb']:.2f})"
    peer = f"{case[COMPILE]['compile_s']:.1f}" if _timed(case, COMPILE) else "-"
    seconds = f"{own['compile_s']:.1f} / {peer}"
    return (
        f"{label:{width}} {eager} {ratios}  {best_peer(case):26} {_times(speed_up(case)):>8} {memory:>13} {seconds:>13} "
        f"{own['loss_difference']:8.1e}"
    )


def _by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["contender"]] = row
    return found


def _timed(case: Mapping[str, Row], name: str) -> bool:
    return name in case and "reason" not in case[name]


def _quotient(case: Mapping[str, Row], field: str, above: str, below: str) -> float | None:
    if not (_timed(case, above) and _timed(case, below)):
        return None
    return float(case[above][field] / case[below][field])


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
