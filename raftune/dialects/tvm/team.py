"""TVM's parallel loops on PyTorch's own OpenMP team.

TVM brings a thread pool of its own. Two pools on the same cores, each spinning while it waits for its next loop, take the
cores from each other between any two operators of a step: measured alone such a kernel wins, in the step everything loses.
Generated code calls whatever launcher is registered when its module is loaded, so a launcher over ``GOMP_parallel`` is
compiled once, with TVM's LLVM, and registered in place of the pool's.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from raftune.dialects.base import BuildError

# libgomp's interface, which LLVM's OpenMP runtime offers as well.
_SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads")
_LAUNCHER = "__TVMBackendParallelLaunch"
_TVM_FFI_INT = 1

# %group is TVMParallelGroupEnv: a handle for barriers, which our loops have none of, and the number of tasks. Each member of
# the team takes every n-th task, because a team may be smaller than asked for. No task count means one for each thread.
_SOURCE = """
%group = type {{ ptr, i32 }}
%job = type {{ ptr, ptr, %group, i32 }}

define internal void @member(ptr %data) {{
entry:
  %first = call i32 inttoptr (i64 {omp_get_thread_num} to ptr)()
  %team = call i32 inttoptr (i64 {omp_get_num_threads} to ptr)()
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
}}

define i32 @launch(ptr %loop, ptr %closure, i32 %asked) {{
  %unasked = icmp eq i32 %asked, 0
  %threads = call i32 inttoptr (i64 {omp_get_max_threads} to ptr)()
  %tasks = select i1 %unasked, i32 %threads, i32 %asked
  %job = alloca %job
  store %job zeroinitializer, ptr %job
  %loop.at = getelementptr %job, ptr %job, i32 0, i32 0
  store ptr %loop, ptr %loop.at
  %closure.at = getelementptr %job, ptr %job, i32 0, i32 1
  store ptr %closure, ptr %closure.at
  %tasks.at = getelementptr %job, ptr %job, i32 0, i32 2, i32 1
  store i32 %tasks, ptr %tasks.at
  call void inttoptr (i64 {GOMP_parallel} to ptr)(ptr @member, ptr %job, i32 0, i32 0)
  %status.at = getelementptr %job, ptr %job, i32 0, i32 3
  %status = load i32, ptr %status.at
  ret i32 %status
}}

define i32 @__tvm_ffi_launcher(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  store i32 {int_type}, ptr %result
  %value.at = getelementptr i8, ptr %result, i64 8
  store i64 ptrtoint (ptr @launch to i64), ptr %value.at
  ret i32 0
}}
"""


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
    import tvm
    import tvm_ffi

    process = ctypes.CDLL(None)
    addresses = {name: ctypes.cast(getattr(process, name), ctypes.c_void_p).value for name in _SYMBOLS}
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "launcher.ll"
            path.write_text(_header(target) + _SOURCE.format(int_type=_TVM_FFI_INT, **addresses), encoding="utf-8")
            module = tvm.runtime.load_module(str(path))
            address = module["launcher"]()
    except Exception as error:  # TVM raises whatever it met: without a launcher no candidate of this dialect can be built
        raise BuildError(f"TVM's LLVM could not load the launcher: {type(error).__name__}: {str(error)[:300]}") from error
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    if library.TVMFFIEnvModRegisterContextSymbol(_LAUNCHER.encode(), ctypes.c_void_p(address)) != 0:
        raise BuildError("TVM did not accept the launcher for parallel loops")
    return module


def _header(target: Any) -> str:
    """Data layout and triple as TVM's own modules for ``target`` state them."""
    import tvm
    from tvm import te

    x = te.placeholder((1,), name="x")
    function = te.create_prim_func([x, te.compute((1,), lambda i: x[i])])
    source = tvm.compile(function, target=target).mod.inspect_source("ll")
    return "".join(f"{line}\n" for line in source.splitlines() if line.startswith("target "))
