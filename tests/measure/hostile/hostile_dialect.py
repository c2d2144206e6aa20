"""A third-party dialect for relu whose candidates misbehave in every way that a measuring process must survive."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from raftune.dialects import store
from raftune.dialects.base import BuildError, Dialect, Kernel, Unsupported
from raftune.workload import Config, Workload


class HostileDialect(Dialect):
    name = "hostile"
    priority = 1

    def version(self) -> str:
        return "1.0"

    def supports(self, workload: Workload) -> bool:
        return workload.op == "aten.relu.default"

    def candidates(self, workload: Workload) -> Sequence[Config]:
        del workload
        return [{"do": "right"}]

    def sample(self, workload: Workload, count: int, seed: int) -> Sequence[Config]:
        if seed < 0:
            raise RuntimeError("no negative seeds")
        print("libraries print")
        return [{"do": "right", "n": seed + i} for i in range(count)]

    def prepare(self, workload: Workload, config: Config) -> None:
        match config["do"]:
            case "kept":
                store.keep("kept", lambda path: path.write_text("relu") and None)
            case "ahead_segfault":
                ctypes.string_at(0)
            case "ahead_hangs":
                time.sleep(600)
            case "ahead_eats":
                self.eaten = [torch.ones(1 << 24) for _ in range(9)]  # 0.6 GB
                time.sleep(600)
            case "build_error":
                raise BuildError("compiler said no")

    def load(self, workload: Workload, config: Config) -> Kernel:
        if config["do"] == "kept" and store.kept("kept") is not None:
            return _Kernels(config).right
        return self.build(workload, config)

    def build(self, workload: Workload, config: Config) -> Kernel:
        match config["do"]:
            case "build_error":
                raise BuildError("compiler said no")
            case "build_raises":
                raise KeyError("tile")
            case "kept":
                raise BuildError("was to be built ahead")
            case "unsupported":
                raise Unsupported("not on this processor")
            case "build_segfault":
                ctypes.string_at(0)
            case "slow_build":
                time.sleep(0.05)
        return _Kernels(config).__getattribute__(config["do"])


class _Kernels:
    def __init__(self, config: Config) -> None:
        self.calls = 0
        self.kept: Any = None
        self.after = config.get("after", 0)

    def right(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    slow_build = right

    def noisy_printer(self, x: torch.Tensor) -> torch.Tensor:
        print("{" * 100, flush=True)
        return torch.relu(x)

    def slow(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            y = torch.relu(x)
        return y

    def sleeps(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return torch.relu(x)

    def segfault(self, x: torch.Tensor) -> torch.Tensor:
        ctypes.string_at(0)
        return x

    def late_segfault(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.after:
            ctypes.string_at(0)
        return torch.relu(x)

    def late_raise(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.after:
            raise RuntimeError("tired")
        return torch.relu(x)

    def exits(self, x: torch.Tensor) -> torch.Tensor:
        os._exit(7)

    def system_exit(self, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit("bye")

    def hang(self, x: torch.Tensor) -> torch.Tensor:
        threading.Event().wait()
        return x

    def huge(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 46)[: x.numel()]

    def eats(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = []
        while True:
            self.kept.append(torch.ones(1 << 23))

    def raises(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bad tile size 17")

    def nan(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, float("nan"))

    def wrong_fast(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def slightly_wrong(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.bfloat16()).float()

    def writes_input(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.mul_(2).mul_(0.5).add_(1e-3).sub_(1e-3))

    def returns_input(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def kept_buffer(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.empty_like(x)
        return self.kept.copy_(torch.relu(x))

    def cached_result(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.relu(x)
        return self.kept.clone()

    def strides(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).t().contiguous().t()

    def shape(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).flatten()

    def dtype(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).double()

    def nothing(self, x: torch.Tensor) -> None:
        return None
