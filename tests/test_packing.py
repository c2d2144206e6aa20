"""Candidates compiled here for another machine: what is packed, in which order, and that the folder needs nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from raftune.cli import main
from raftune.device import cuda_architecture
from raftune.dialects import BuildError, Dialect, registry, store
from raftune.dialects.aten import AtenDialect
from raftune.dialects.cutlass import CutlassDialect, toolchain
from raftune.graph import Task
from raftune.graph.workloads import workload_from_call
from raftune.packing import PackError, build_pack, problems, read_pack
from raftune.search import Budget
from raftune.workload import Config, Workload

aten = torch.ops.aten
DEVICE = cuda_architecture("cuda:sm_80")


class Compiled(Dialect):
    """Writes a file for each config; of config 1 it says that it does not compile."""

    name = "compiled"
    priority = 10
    device_kinds = frozenset({"cuda"})
    batches: list[int]

    def __init__(self) -> None:
        self.batches = []

    def version(self) -> str:
        return "1"

    def supports(self, workload: Workload) -> bool:
        return True

    def candidates(self, workload: Workload) -> Sequence[Config]:
        return [{"n": n} for n in range(4)]

    def prepare(self, workload: Workload, config: Config) -> None:
        if config["n"] == 1:
            raise BuildError("config n=1\ndoes not compile")
        store.keep(self._file(workload, config), lambda path: path.write_text("library") and None)

    def prepare_all(self, candidates: Sequence[tuple[Workload, Config]]) -> list[BuildError | None]:
        self.batches.append(len(candidates))
        return super().prepare_all(candidates)

    def build(self, workload: Workload, config: Config):
        if store.kept(self._file(workload, config)) is None:
            raise BuildError("is not there")
        return lambda *inputs: inputs[0]

    def _file(self, workload: Workload, config: Config) -> str:
        return f"{workload.digest}-{config['n']}.txt"


def product(n: int) -> Workload:
    return workload_from_call(aten.mm.default, (torch.empty(n, n), torch.empty(n, n)))


TASKS = (Task(product(8), 1), Task(product(64), 1))


@pytest.fixture
def dialect() -> Iterator[Compiled]:
    made = Compiled()
    with registry.standing_in([AtenDialect(), made]):
        yield made


def pack(folder: Path, **budget: int):
    return build_pack(TASKS, DEVICE, folder, Budget(**budget), dialects=("compiled",))


def test_every_task_gets_its_best_first_and_the_heaviest_comes_first(tmp_path: Path, dialect: Compiled) -> None:
    report = pack(tmp_path / "pack", trials=3)
    found = read_pack(tmp_path / "pack")
    assert [(entry.workload, entry.candidate.config["n"]) for entry in found.entries] == [
        (TASKS[1].workload, 0),
        (TASKS[0].workload, 0),
        (TASKS[1].workload, 2),
    ]
    assert (report.packed, report.tasks, found.device) == (3, 2, DEVICE)
    assert problems(found) == []


def test_a_pack_is_gone_on_with_and_failures_are_not_tried_again(tmp_path: Path, dialect: Compiled) -> None:
    folder = tmp_path / "pack"
    assert pack(folder, trials=1).packed == 1
    report = pack(folder)
    assert (report.packed, report.left_out) == (6, 0)
    assert report.failures == {"config n=1 does not compile": 2}
    before = list(dialect.batches)
    assert pack(folder).packed == 6
    assert dialect.batches == before
    assert "RAFTUNE_KERNELS" not in os.environ


def test_a_missing_library_is_a_problem(tmp_path: Path, dialect: Compiled) -> None:
    pack(tmp_path / "pack")
    found = read_pack(tmp_path / "pack")
    next(found.kernels.iterdir()).unlink()
    assert len(problems(found)) == 1


def test_folders_of_others_are_left_alone(tmp_path: Path, dialect: Compiled) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(PackError, match="is not empty"):
        pack(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    folder = tmp_path / "pack"
    pack(folder, trials=1)
    with pytest.raises(PackError, match=r"for sm_80 \(sm_80\), not for sm_90"):
        build_pack(TASKS, cuda_architecture("cuda:sm_90"), folder, Budget())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "device": {}, "entries": [], "failed": []}',
    ],
)
def test_a_manifest_that_is_none_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(PackError, match="manifest"):
        read_pack(tmp_path)


def test_entries_of_a_stranger_are_checked(tmp_path: Path, dialect: Compiled) -> None:
    pack(tmp_path / "pack", trials=1)
    path = tmp_path / "pack" / "manifest.json"
    for key, content in (
        ("candidate", {"dialect": "compiled", "version": "1", "config": "n"}),
        ("workload", 3),
        ("weight", "x"),
    ):
        value = json.loads(path.read_text())
        value["entries"][0][key] = content
        (tmp_path / "manifest.json").write_text(json.dumps(value))
        with pytest.raises(PackError, match="does not describe"):
            read_pack(tmp_path)


def test_device_and_folder_go_together(tmp_path: Path) -> None:
    from click.testing import CliRunner

    for words in (["--device", "cuda:sm_90"], ["--build-only", str(tmp_path / "p")]):
        result = CliRunner().invoke(main, ["tune", "model", "mlp", *words])
        assert result.exit_code == 2
        assert "go together" in result.output


_LOADER = """
import sys
sys.modules["tvm"] = sys.modules["tvm_ffi"] = sys.modules["cutlass_library"] = None
from pathlib import Path
from raftune.dialects.cutlass import toolchain
from raftune.packing import problems, read_pack
assert isinstance(toolchain.find(), str)
pack = read_pack(Path(sys.argv[1]))
print(len(pack.entries), problems(pack))
"""


@pytest.mark.skipif(isinstance(toolchain.find(), str), reason=str(toolchain.find()))
def test_a_pack_loads_where_there_is_no_compiler(tmp_path: Path) -> None:
    half = torch.empty(64, 64, dtype=torch.float16)
    tasks = [Task(workload_from_call(aten.mm.default, (half, half)), 1)]
    with registry.standing_in([AtenDialect(), CutlassDialect()]):
        report = build_pack(tasks, DEVICE, tmp_path / "pack", Budget(trials=2))
    assert (report.packed, report.failures) == (2, {})
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", _LOADER, str(tmp_path / "pack")], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "2 []", found.stderr
