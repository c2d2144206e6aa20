"""From kernel specs to libraries on disk: several kernels a source file, several compilers at once as far as memory goes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raftune.dialects import store
from raftune.dialects.base import BuildError
from raftune.dialects.cutlass import toolchain
from raftune.dialects.cutlass.render import translation_unit
from raftune.dialects.cutlass.schema import Sm90Gemm
from raftune.dialects.cutlass.spec import KernelSpec
from raftune.workload import canonical_json, digest_text

# A wgmma kernel takes a compiler minutes on a busy core; one that takes so long is not going to end.
_PATIENCE_S = 900.0
# What one compiler needs at most, in bytes: measured with three kernels a file (nvcc 13.0).
_MEMORY = {True: 5 << 30, False: 2 << 30}
# The headers take most of the time, and a failure is found by compiling one by one.
_KERNELS_A_FILE = 4
_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "--expt-relaxed-constexpr", "-w")


def library_name(spec: KernelSpec, arch: str) -> str:
    """The file that holds the kernel for devices of ``arch`` (``sm_80``), made by these templates."""
    return f"cutlass-{digest_text(canonical_json([toolchain.templates_digest(), toolchain.CUTLASS, arch, spec.canonical]))}.so"


def compiled(spec: KernelSpec, arch: str) -> Path:
    """The library of one kernel, from disk or compiled now. Raises :class:`BuildError` with what the compiler said."""
    if (path := store.kept(library_name(spec, arch))) is not None:
        return path
    (result,) = compile_all([spec], arch).values()
    if isinstance(result, BuildError):
        raise result
    return result


def compile_all(specs: Iterable[KernelSpec], arch: str) -> dict[KernelSpec, Path | BuildError]:
    """The library of every kernel, or why there is none; what is on disk already is not compiled again."""
    results: dict[KernelSpec, Path | BuildError] = {}
    missing: dict[bool, list[KernelSpec]] = {True: [], False: []}
    for spec in dict.fromkeys(specs):
        path = store.kept(library_name(spec, arch))
        if path is None:
            missing[isinstance(spec.schedule, Sm90Gemm)].append(spec)
        else:
            results[spec] = path
    for large, group in missing.items():
        files = [group[i : i + _KERNELS_A_FILE] for i in range(0, len(group), _KERNELS_A_FILE)]
        if not files:
            continue
        with ThreadPoolExecutor(_compilers(_MEMORY[large], len(files))) as pool:
            for found in pool.map(lambda unit: _compile_unit(unit, arch), files):
                results |= found
    return results


def _compilers(memory: int, files: int) -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(files, len(os.sched_getaffinity(0)), int(available // memory)))


def _compile_unit(specs: Sequence[KernelSpec], arch: str) -> dict[KernelSpec, Path | BuildError]:
    """Compile ``specs`` together, or one by one if that fails: one bad kernel costs one kernel."""
    try:
        return dict(_keep(specs, arch))
    except BuildError as error:
        if len(specs) == 1:
            return {specs[0]: error}
    results: dict[KernelSpec, Path | BuildError] = {}
    for spec in specs:
        results |= _compile_unit([spec], arch)
    return results


def _keep(specs: Sequence[KernelSpec], arch: str) -> list[tuple[KernelSpec, Path]]:
    """Have one library under the names of all its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.so"
        _run_nvcc(specs, arch, Path(folder), made)
        found = []
        first: Path | None = None
        for spec in specs:
            path = store.keep(library_name(spec, arch), _linked(first, made))
            if path is None:
                raise BuildError(
                    "the compiled kernel cannot be kept: the kernel folder cannot be written to, or its disk is full"
                )
            first = first or path
            found.append((spec, path))
        return found


def _linked(first: Path | None, made: Path) -> Callable[[Path], None]:
    """Write the first name, link the others to it: equal files take their space once."""

    def write(path: Path) -> None:
        if first is None:
            path.write_bytes(made.read_bytes())
        else:
            os.link(first, path)

    return write


def _run_nvcc(specs: Sequence[KernelSpec], arch: str, folder: Path, made: Path) -> None:
    tools = toolchain.find()
    if isinstance(tools, str):
        raise BuildError(tools)
    source = folder / "kernels.cu"
    source.write_text(translation_unit(specs), encoding="utf-8")
    number = arch.removeprefix("sm_")
    command = [
        str(tools.nvcc),
        *_FLAGS,
        f"-gencode=arch=compute_{number},code=sm_{number}",
        *(f"-I{path}" for path in tools.includes),
        str(source),
        "-o",
        str(made),
    ]
    # The compiler's own temporary files go with the folder when it is killed.
    environment = os.environ | {"TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"nvcc did not end within {_PATIENCE_S:.0f} s") from error
    except OSError as error:
        raise BuildError(f"nvcc could not be started: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"nvcc failed with {done.returncode}: {_first_error(done.stderr or done.stdout)}")


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")[:500]
