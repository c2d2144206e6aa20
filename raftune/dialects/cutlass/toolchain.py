"""What compiles the kernels: NVIDIA's compiler and CUTLASS's headers, found without importing anything of theirs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

CUTLASS = "4.2.0"
"""The headers that the templates are written for: other releases move types, and would be another version of the dialect."""

_TEMPLATES = Path(__file__).parent / "kernels"


@dataclass(frozen=True, slots=True)
class Toolchain:
    nvcc: Path
    includes: tuple[Path, ...]


@cache
def templates_digest() -> str:
    """Changes with every change of the templates, which makes other kernels of the same configs."""
    sources = sorted(_TEMPLATES.glob("*.cuh"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]


@cache
def find() -> Toolchain | str:
    """The toolchain, or in one line what is missing and where to get it."""
    include = _headers()
    if include is None:
        return f"CUTLASS's headers are not installed: pip install --no-deps nvidia-cutlass=={CUTLASS}.0"
    version = _version(include)
    if version != CUTLASS:
        return f"CUTLASS {version} is installed, {CUTLASS} is needed: pip install --no-deps nvidia-cutlass=={CUTLASS}.0"
    nvcc = _nvcc()
    if nvcc is None:
        return "nvcc was not found on PATH, below $CUDA_HOME or among the installed packages: install the CUDA toolkit"
    return Toolchain(nvcc, (_TEMPLATES, include))


def _headers() -> Path | None:
    try:
        package = find_spec("cutlass_library")
    except (ImportError, ValueError):
        return None
    for place in (package.submodule_search_locations or ()) if package else ():
        include = Path(place) / "source" / "include"
        if (include / "cutlass" / "version.h").is_file():
            return include
    return None


def _version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8", errors="replace")
    parts = (re.search(rf"CUTLASS_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(part[1] if part else "?" for part in parts)


def _nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        return Path(found)
    # The toolkit as wheels lies below nvidia/cu13 of the environment's packages.
    packages = (Path(path) / "nvidia" for path in sys.path if path)
    return next((nvcc for folder in packages for nvcc in sorted(folder.glob("cu*/bin/nvcc"))), None)
