"""Compiled kernels on disk: whole or absent, and only from a folder that nobody else can write to."""

import subprocess
import sys
from pathlib import Path

import pytest

from raftune.dialects import store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "raftune" / "kernels"


def test_what_is_kept_is_found_and_nothing_else(folder: Path) -> None:
    assert store.kept("a.so") is None
    assert store.keep("a.so", lambda path: path.write_bytes(b"first") and None) == folder / "a.so"
    assert store.keep("a.so", lambda path: path.write_bytes(b"second") and None) == folder / "a.so"
    assert store.kept("a.so").read_bytes() == b"second"
    assert store.kept("b.so") is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["a.so"]


def test_half_a_file_is_never_seen(folder: Path) -> None:
    def dies(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        store.keep("a.so", dies)
    assert store.kept("a.so") is None
    assert not list(folder.iterdir())


def test_a_folder_that_others_can_write_to_is_not_trusted(folder: Path) -> None:
    store.keep("a.so", lambda path: path.write_bytes(b"code") and None)
    folder.chmod(0o770)
    assert store.kept("a.so") is None
    assert store.keep("b.so", lambda path: path.write_bytes(b"code") and None) is None


def test_without_a_place_nothing_is_kept(folder: Path) -> None:
    folder.parent.parent.joinpath("raftune").write_text("a file where the folder should be")
    assert store.keep("a.so", lambda path: path.write_bytes(b"code") and None) is None


def test_a_place_that_cannot_be_looked_into_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 5000)  # as without permission, also for root
    assert store.kept("a.so") is None
    assert store.keep("a.so", lambda path: path.write_bytes(b"code") and None) is None


PROGRAM = """
import sys
import torch
if {blocked}:
    sys.modules["tvm"] = None  # an import of it fails
torch.set_num_threads(2)
from raftune.dialects.tvm import TvmDialect
from raftune.graph.workloads import workload_from_call
aten = torch.ops.aten
torch.manual_seed(0)
x, y = torch.randn(300, 700), torch.randn(300, 700)
for op, args in [
    (aten.gelu.default, (x,)),
    (aten._softmax.default, (x, -1, False)),
    (aten.native_layer_norm.default, (x, [700], None, None, 1e-5)),
    (aten.add.Tensor, (x.t(), y.t())),
    (aten.mm.default, (x[:, :64].t(), y)),
]:
    workload = workload_from_call(op, args, {{}})
    kernel = TvmDialect().load(workload, {{"schedule": "default"}})
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    torch.testing.assert_close(kernel(*inputs), op(*args), rtol=1e-4, atol=1e-4)
print(sys.modules.get("tvm") is not None)
"""


def run(blocked: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=blocked)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kept_kernels_run_in_a_process_without_tvm(folder: Path) -> None:
    assert run(blocked=False) == "True"
    kernels = [path for path in folder.iterdir() if "launcher" not in path.name]
    assert len(kernels) == 5
    assert run(blocked=True) == "False"

    kernels[0].write_bytes(kernels[0].read_bytes()[:100])
    assert run(blocked=False) == "True"  # the damaged one is compiled anew
    assert run(blocked=True) == "False"
