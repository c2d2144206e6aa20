"""TorchInductor on one workload alone: C++ loops generated and compiled for exactly its specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from raftune.device import current_device
from raftune.dialects.base import BuildError, Dialect, Kernel, Unsupported
from raftune.dialects.calls import check_keys, choice, torch_version
from raftune.dialects.inductor import lower, toolchain
from raftune.dialects.inductor.update import UPDATES
from raftune.dialects.products import Product
from raftune.workload import Config, Workload

# Inductor calls PyTorch's own kernel for these: what the default runs, with more around it.
_NOT_LOWERED = (
    "aten.mm.",
    "aten.addmm.",
    "aten.bmm.",
    "aten.baddbmm.",
    "aten.convolution.",
    "aten.convolution_backward.",
    "aten._scaled_dot_product_",
    "aten._thnn_fused_",
    "aten.sort.",
    "aten.topk.",
    "aten._cdist_",
    "aten._embedding_bag",
    "aten._fused_",
)
# Multiply-adds up to which plain loops can compete with a BLAS at all.
_BROADCAST_LIMIT = 1 << 21
# Parameters of one update: every one adds loops, and the C++ compiler's time grows with them.
_PARAMETER_LIMIT = 256


class InductorDialect(Dialect):
    """``lowering`` says how a workload is put to Inductor; ``simdlen``, if given, narrows its vectors (bits)."""

    name: ClassVar[str] = "inductor"
    priority: ClassVar[int] = 50

    def version(self) -> str:
        return f"{torch_version()} {toolchain.compiler_version()}".strip()

    def unavailable(self) -> str | None:
        return toolchain.problem()

    def supports(self, workload: Workload) -> bool:
        return bool(_lowerings(workload))

    def candidates(self, workload: Workload) -> Sequence[Config]:
        narrower: list[Config] = [{"simdlen": 256}] if 512 in _simd_lengths() else []
        return [{"lowering": lowering, **width} for width in [{}, *narrower] for lowering in _lowerings(workload)]

    def build(self, workload: Workload, config: Config) -> Kernel:
        offered = _lowerings(workload)
        if not offered:
            raise Unsupported(f"Inductor generates no code for {workload.op} with these specs")
        check_keys(config, ("lowering", "simdlen"))
        lowering = choice(config, "lowering", offered)
        simdlen = config.get("simdlen")
        if simdlen is not None and (type(simdlen) is not int or simdlen not in _simd_lengths()):
            raise BuildError(f"config simdlen={simdlen!r}: this processor has vectors of {_simd_lengths()} bits")
        return lower.build(workload, lowering, simdlen)

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        """How the workload is lowered, and the vector width asked for (0: the widest)."""
        del workload
        return {
            "broadcast": float(config.get("lowering") == "broadcast"),
            "template": float(config.get("lowering") == "template"),
            "simdlen": float(config.get("simdlen", 0)),
        }


def _lowerings(workload: Workload) -> tuple[str, ...]:
    """What can be asked of Inductor for the workload; empty where it would only call PyTorch's kernels."""
    product = Product.of(workload)
    if product is not None:
        return ("template", "broadcast") if product.size <= _BROADCAST_LIMIT else ("template",)
    if workload.op in UPDATES:
        count = workload.operators[0].args[0]
        return ("default",) if isinstance(count, tuple) and len(count) <= _PARAMETER_LIMIT else ()
    if workload.mutates or any(not spec.numel for spec in (*workload.inputs, *workload.results)):
        return ()
    return () if all(operator.op.startswith(_NOT_LOWERED) for operator in workload.operators) else ("default",)


def _simd_lengths() -> tuple[int, ...]:
    flags = current_device(1).vector
    return (*((256,) if "avx2" in flags else ()), *((512,) if "avx512f" in flags else ()))
