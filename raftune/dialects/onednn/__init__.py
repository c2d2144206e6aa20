"""oneDNN inside PyTorch: products and convolutions, plain or with packed weights, with what follows them fused in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

from raftune.dialects.base import Dialect, Kernel, Unsupported
from raftune.dialects.calls import torch_version
from raftune.dialects.convolutions import Convolution
from raftune.dialects.epilogue import PATTERNS, Epilogue
from raftune.dialects.onednn import convolution, matmul
from raftune.dialects.products import Product
from raftune.pattern import Pattern
from raftune.workload import Config, Workload

_DTYPES = ("float32", "bfloat16")


class OnednnDialect(Dialect):
    """Operators of ``torch.ops.mkldnn``. oneDNN is part of the PyTorch build, whose version says which one."""

    name: ClassVar[str] = "onednn"
    priority: ClassVar[int] = 70

    def version(self) -> str:
        return torch_version()

    def unavailable(self) -> str | None:
        return _unavailable()

    def supports(self, workload: Workload) -> bool:
        return _core(workload) is not None

    def patterns(self) -> Sequence[Pattern]:
        return PATTERNS

    def candidates(self, workload: Workload) -> Sequence[Config]:
        found = _core(workload)
        if found is None:
            return ()
        core, _ = found
        return matmul.configs(core) if isinstance(core, Product) else convolution.configs(core)

    def build(self, workload: Workload, config: Config) -> Kernel:
        found = _core(workload)
        if found is None:
            raise Unsupported(f"oneDNN in PyTorch has no kernel for {workload.op} with these specs")
        core, epilogue = found
        if core.workload.inputs[0].dtype == "bfloat16":
            import torch

            if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                raise Unsupported("oneDNN has no bfloat16 kernels on this processor")
        if isinstance(core, Convolution):
            return convolution.build(core, config, epilogue)
        assert epilogue is not None
        return matmul.build(core, config, epilogue)

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        """Elements (log2) that are rearranged outside oneDNN's kernel, and whether the kernel reads a packed weight."""
        found = _core(workload)
        if found is None:
            return {}
        core, _ = found
        if isinstance(core, Product):
            rearranged = core.result.numel if config.get("result") == "column" else 0
        else:
            changed = config.get("layout", core.layout) != core.layout
            rearranged = sum(s.numel for s in (*core.workload.inputs, *core.workload.results)) if changed else 0
        return {"rearranged": math.log2(1 + rearranged), "packed": float(config.get("weight", "plain") != "plain")}


@cache
def _unavailable() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return None if torch._C._has_mkldnn else f"PyTorch {torch.__version__} was built without oneDNN (mkldnn)"


def _core(workload: Workload) -> tuple[Product | Convolution, Epilogue | None] | None:
    """The product or convolution of the region in a form that oneDNN takes, and its epilogue, which a backward has not."""
    if any(s.dtype not in _DTYPES or s.dtype != workload.inputs[0].dtype for s in workload.inputs):
        return None
    epilogue = Epilogue.of(workload)
    alone = workload if epilogue is None else epilogue.core
    core = Product.of(alone) or Convolution.of(alone)
    return None if core is None else (core, epilogue)
