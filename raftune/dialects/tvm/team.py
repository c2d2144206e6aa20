"""TVM's parallel loops on PyTorch's own OpenMP team.

TVM brings a thread pool of its own. Two pools on the same cores, each spinning while it waits for its next loop, take the
cores from each other between any two operators of a step: measured alone such a kernel wins, in the step everything loses.
Generated code calls whatever launcher is registered when its module is loaded, so a launcher over ``GOMP_parallel`` is
compiled once, with TVM's LLVM, and registered in place of the pool's. It is kept on disk with what else of TVM's runtime a
kernel calls, memory for intermediate results, so that kept kernels run without TVM.
"""

from __future__ import annotations

import ctypes
import platform
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from raftune.dialects.base import BuildError
from raftune.dialects.tvm import library
from raftune.workload import digest_text

# libgomp's interface, which LLVM's OpenMP runtime offers as well.
_SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")

# %group is TVMParallelGroupEnv: a handle for barriers, which our loops have none of, and the number of tasks. Each member of
# the team takes every n-th task, because a team may be smaller than asked for. No task count means one for each thread.
_SOURCE = """
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i32 @omp_get_max_threads()
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)

%group = type { ptr, i32 }
%job = type { ptr, ptr, %group, i32 }

define internal void @member(ptr %data) {
entry:
  %first = call i32 @omp_get_thread_num()
  %team = call i32 @omp_get_num_threads()
  %loop.at = getelementptr %job, ptr %data, i32 0, i32 0
  %loop = load ptr, ptr %loop.at
  %closure.at = getelementptr %job, ptr %data, i32 0, i32 1
  %closure = load ptr, ptr %closure.at
  %group.at = getelementptr %job, ptr %data, i32 0, i32 2
  %tasks.at = getelementptr %job, ptr %data, i32 0, i32 2, i32 1
  %tasks = load i32, ptr %tasks.at
  br label %head
head:
  %task = phi i32 [ %first, %entry ], [ %next, %continue ]
  %more = icmp slt i32 %task, %tasks
  br i1 %more, label %run, label %done
run:
  %status = call i32 %loop(i32 %task, ptr %group.at, ptr %closure)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %keep, label %continue
keep:
  %status.at = getelementptr %job, ptr %data, i32 0, i32 3
  store i32 %status, ptr %status.at
  br label %continue
continue:
  %next = add i32 %task, %team
  br label %head
done:
  ret void
}

define i32 @launch(ptr %loop, ptr %closure, i32 %asked) {
  %unasked = icmp eq i32 %asked, 0
  %threads = call i32 @omp_get_max_threads()
  %tasks = select i1 %unasked, i32 %threads, i32 %asked
  %job = alloca %job
  store %job zeroinitializer, ptr %job
  %loop.at = getelementptr %job, ptr %job, i32 0, i32 0
  store ptr %loop, ptr %loop.at
  %closure.at = getelementptr %job, ptr %job, i32 0, i32 1
  store ptr %closure, ptr %closure.at
  %tasks.at = getelementptr %job, ptr %job, i32 0, i32 2, i32 1
  store i32 %tasks, ptr %tasks.at
  call void @GOMP_parallel(ptr @member, ptr %job, i32 0, i32 0)
  %status.at = getelementptr %job, ptr %job, i32 0, i32 3
  %status = load i32, ptr %status.at
  ret i32 %status
}

define ptr @allocate(i32 %kind, i32 %number, i64 %bytes, i32 %code, i32 %bits) {
  %more = add i64 %bytes, 63
  %whole = and i64 %more, -64
  %memory = call ptr @aligned_alloc(i64 64, i64 %whole)
  ret ptr %memory
}

define i32 @release(i32 %kind, i32 %number, ptr %memory) {
  call void @free(ptr %memory)
  ret i32 0
}
"""

# A function of TVM's calling convention that returns an address as an integer (type 1, kTVMFFIInt).
_ADDRESS = """
define i32 @__tvm_ffi_{name}(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  store i32 1, ptr %result
  %value.at = getelementptr i8, ptr %result, i64 8
  store i64 ptrtoint (ptr @{name} to i64), ptr %value.at
  ret i32 0
}}
"""
_LAUNCHER = {"launch": "__TVMBackendParallelLaunch"}
_MEMORY = {"allocate": "__TVMBackendAllocWorkspace", "release": "__TVMBackendFreeWorkspace"}


@cache
def has_team() -> bool:
    """Whether this process holds an OpenMP runtime with libgomp's interface, as PyTorch loads one."""
    import torch  # noqa: F401  # what loads the runtime

    process = ctypes.CDLL(None)
    return all(hasattr(process, name) for name in _SYMBOLS)


@cache
def join_team(target: Any) -> Any:
    """Have TVM's modules that are loaded from now on run their parallel loops on the team; returns what must stay alive.

    Does nothing where there is no team. Raises :class:`BuildError` if TVM's LLVM does not take the launcher.
    """
    if not has_team():
        return None
    import tvm  # registers its own pool, so it has to be there before the launcher is

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "launcher.ll"
            path.write_text(_header(target) + _source(), encoding="utf-8")
            module = tvm.runtime.load_module(str(path))
            _register(module.get_function, _LAUNCHER)
    except Exception as error:  # TVM raises whatever it met: without a launcher no candidate of this dialect can be built
        raise BuildError(f"TVM's LLVM could not load the launcher: {type(error).__name__}: {str(error)[:300]}") from error
    library.keep(_name(), module)
    return module


@cache
def join_kept_team() -> bool:
    """As :func:`join_team`, in a process without TVM, for kernels from disk; whether they can run: their launcher is there."""
    load = library.loaded(_name())
    if load is None or not has_team():
        return False
    _register(load, _LAUNCHER | _MEMORY)
    return True


def _register(function: Callable[[str], Callable[[], int]], names: Mapping[str, str]) -> None:
    """Have modules that are loaded from now on call our functions, of the given names, for TVM's."""
    import tvm_ffi

    process = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    for ours, theirs in names.items():
        if process.TVMFFIEnvModRegisterContextSymbol(theirs.encode(), ctypes.c_void_p(function(ours)())) != 0:
            raise BuildError(f"TVM did not accept the function for {theirs}")


def _source() -> str:
    return _SOURCE + "".join(_ADDRESS.format(name=name) for name in _LAUNCHER | _MEMORY)


def _name() -> str:
    return f"tvm-launcher-{platform.machine()}-{digest_text(_source())}"


def _header(target: Any) -> str:
    """Data layout and triple as TVM's own modules for ``target`` state them."""
    import tvm
    from tvm import te

    x = te.placeholder((1,), name="x")
    function = te.create_prim_func([x, te.compute((1,), lambda i: x[i])])
    source = tvm.compile(function, target=target).mod.inspect_source("ll")
    return "".join(f"{line}\n" for line in source.splitlines() if line.startswith("target "))
