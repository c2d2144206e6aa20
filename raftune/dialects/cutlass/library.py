"""A compiled kernel: its functions in the library, and the structs that they take, which mirror ``kernels/problem.cuh``."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from raftune.dialects.base import BuildError
from raftune.dialects.cutlass.spec import KernelSpec

_SUCCESS = 0
# cutlass::Status and the runtime's codes, as problem.cuh tells them apart.
_RUNTIME_ERROR = 1000
_STATUS = {1: "misaligned operand", 2: "invalid data type", 3: "invalid layout", 4: "invalid problem", 5: "not supported"}


class Gemm(Structure):
    """``raftune::Gemm``."""

    _fields_: ClassVar[Any] = [
        *((name, c_int64) for name in ("m", "n", "k", "batch")),
        *((name, c_void_p) for name in ("a", "b", "source", "out")),
        *((name, c_int64) for name in ("lda", "ldb", "lds", "ldo", "batch_a", "batch_b", "batch_source", "batch_out")),
        *((name, c_float) for name in ("alpha", "beta")),
        *((name, c_int32) for name in ("splits", "processors")),
    ]


class Convolution(Structure):
    """``raftune::Convolution``."""

    _fields_: ClassVar[Any] = [
        *((name, c_int32) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")),
        *((name, c_int32) for name in ("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "splits")),
        *((name, c_void_p) for name in ("a", "b", "source", "out")),
        *((name, c_float) for name in ("alpha", "beta")),
    ]


class Library:
    """The functions of one kernel. Loading needs no device. Raises :class:`BuildError` if the file does not hold ``spec``."""

    def __init__(self, path: Path, spec: KernelSpec) -> None:
        structure = Gemm if spec.problem == "gemm" else Convolution
        try:
            loaded = ctypes.CDLL(str(path))
            said = getattr(loaded, f"{spec.symbol}_spec")
            self._can_implement = getattr(loaded, f"{spec.symbol}_can_implement")
            self._workspace = getattr(loaded, f"{spec.symbol}_workspace")
            self._run = getattr(loaded, f"{spec.symbol}_run")
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path.name} is not a library with this kernel: {error}") from error
        said.argtypes, said.restype = [], c_char_p
        if said() != spec.canonical.encode():
            raise BuildError(f"{path.name} holds another kernel than its name says: delete it")
        self._can_implement.argtypes, self._can_implement.restype = [POINTER(structure)], c_int
        self._workspace.argtypes, self._workspace.restype = [POINTER(structure)], c_size_t
        self._run.argtypes, self._run.restype = [POINTER(structure), c_void_p, c_void_p], c_int

    def refusal(self, problem: Structure) -> str | None:
        """Why the kernel cannot compute a problem of these sizes, ``None`` if it can. Needs no device."""
        code = self._can_implement(ctypes.byref(problem))
        return None if code == _SUCCESS else describe(code)

    def workspace(self, problem: Structure) -> int:
        """Bytes of scratch memory on the device. Asks the device."""
        return int(self._workspace(ctypes.byref(problem)))

    def run(self, problem: Structure, workspace: int | None, stream: int) -> None:
        """Launch. Raises ``RuntimeError``."""
        code = self._run(ctypes.byref(problem), workspace, stream)
        if code != _SUCCESS:
            raise RuntimeError(f"CUTLASS: {describe(code)}")


def describe(code: int) -> str:
    if code >= _RUNTIME_ERROR:
        return f"CUDA error {code - _RUNTIME_ERROR}"
    return _STATUS.get(code, f"status {code}")
