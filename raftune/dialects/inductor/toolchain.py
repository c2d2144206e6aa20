"""The C++ compiler that Inductor would call, found the way it looks for one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache


def compiler() -> str:
    """The command: ``$CXX``, else the platform's usual one."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def problem() -> str | None:
    """Why nothing can be compiled here, in one line; ``None`` if it can."""
    command = compiler()
    if shutil.which(command) is None:
        return f"no C++ compiler: {command!r} is not on the PATH (install g++, or set CXX)"
    return None


def compiler_version() -> str:
    """``g++ 12.2.0``, or an empty text if there is no compiler: generated code is only as fast as its compiler makes it."""
    path = shutil.which(compiler())
    return "" if path is None else _version_of(path)


@cache
def _version_of(path: str) -> str:
    try:
        run = subprocess.run([path, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return os.path.basename(path)
    return f"{os.path.basename(path)} {run.stdout.strip()}"
