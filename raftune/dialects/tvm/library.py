"""Compiled kernels as shared libraries on disk, which load without TVM: its import takes two seconds and 170 MB.

A library needs only ``tvm_ffi``, and the launcher of :mod:`raftune.dialects.tvm.team` if it has parallel loops.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from raftune.dialects import store
from raftune.workload import Candidate, Workload, canonical_json, digest_text

_LINKERS = ("cc", "gcc", "clang")
_LINK_TIMEOUT_S = 60.0
# Only TVM's runtime has this, of what kernels of ours call.
_RUNTIME_ONLY = b"TVMBackendParallelBarrier"


def name_of(workload: Workload, candidate: Candidate, processor: str) -> str:
    """The name of a kernel's library: other code, version or processor means another name."""
    return f"tvm-{digest_text(canonical_json([workload.digest, candidate.digest, processor, _sources()]))}"


def is_kept(name: str) -> bool:
    return store.kept(f"{name}.so") is not None


def loaded(name: str) -> Callable[[str], Callable[..., Any]] | None:
    """The functions of the library of that name, by theirs; ``None`` if it is not there, or not readable any more."""
    path = store.kept(f"{name}.so")
    if path is None:
        return None
    import tvm_ffi

    try:
        found: Callable[[str], Callable[..., Any]] = tvm_ffi.load_module(str(path)).get_function
    except Exception:  # whatever a damaged file brings up: the kernel is compiled anew
        return None
    return found


def keep(name: str, module: Any) -> None:
    """Keep a compiled TVM module (``kind`` ``llvm``) as a library; without a linker, or a place, nothing happens."""
    linker = next(filter(None, map(shutil.which, _LINKERS)), None)
    if linker is None:
        return

    def write(path: Path) -> None:
        code = path.with_suffix(".o")
        module.write_to_file(str(code), "o")
        if _RUNTIME_ONLY in code.read_bytes():
            raise OSError("needs TVM's runtime")
        subprocess.run([linker, "-shared", "-o", path, code], capture_output=True, check=True, timeout=_LINK_TIMEOUT_S)

    try:
        store.keep(f"{name}.so", write)
    except subprocess.SubprocessError:  # a broken linker: the kernel is there, and compiled anew next time
        return


@cache
def _sources() -> str:
    """Digest of this dialect's own code, which decides what a config means."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return digest_text("".join(file.read_text(encoding="utf-8") for file in files))
