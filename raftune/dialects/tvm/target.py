"""What code is generated for: TVM's target, its vector width, and the number of threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from raftune.device import current_device, processor_features
from raftune.dialects.tvm.team import has_team


@dataclass(frozen=True, slots=True)
class HostTarget:
    """``vector_bytes`` is the width of a vector register; ``threads`` the number that a parallel loop may use."""

    target: Any
    vector_bytes: int
    threads: int

    def lanes(self, itemsize: int = 4) -> int:
        return self.vector_bytes // itemsize


def host_target() -> HostTarget:
    """This machine's processor with the threads of this process."""
    return _host_target(thread_count())


def host_processor() -> str:
    """Names what :func:`host_target` stands for, without TVM."""
    return f"{thread_count()} {processor_features()}"


def thread_count() -> int:
    """PyTorch's threads, on which the kernels run; without those the size of TVM's pool, which ``TVM_NUM_THREADS`` fixes."""
    text = "" if has_team() else os.environ.get("TVM_NUM_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    import torch

    return torch.get_num_threads()


@cache
def _host_target(threads: int) -> HostTarget:
    from tvm.target import Target, codegen

    triple = codegen.llvm_get_system_triple()
    cpu = codegen.llvm_get_system_cpu()
    return HostTarget(Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": threads}), vector_bytes(), threads)


def vector_bytes() -> int:
    """Width of a vector register of this processor, found without TVM."""
    flags = current_device(1).vector
    if "avx512f" in flags:
        return 64
    return 32 if "avx2" in flags or "avx" in flags else 16
