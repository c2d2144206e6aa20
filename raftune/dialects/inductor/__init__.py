"""TorchInductor on one workload alone: C++ loops generated and compiled for exactly its specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from raftune.dialects.base import Dialect, Kernel, Unsupported
from raftune.dialects.calls import check_keys, choice, torch_version
from raftune.dialects.inductor import lower, toolchain
from raftune.dialects.inductor.update import UPDATES
from raftune.dialects.products import Product
from raftune.workload import Config, In, Operator, Out, TensorSpec, Workload

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
# Multiply-adds up to which generated loops can compete with a BLAS: beyond, they were seen to take twice its time and more.
_PRODUCT_LIMIT = 1 << 21
# Parameters of one update: every one adds loops, and the C++ compiler's time grows with them.
_PARAMETER_LIMIT = 256


class InductorDialect(Dialect):
    """``lowering`` says how a workload is put to Inductor."""

    name: ClassVar[str] = "inductor"
    priority: ClassVar[int] = 50
    takes_graphs: ClassVar[bool] = True
    device_kinds: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})

    def version(self) -> str:
        return f"{torch_version()} {toolchain.compiler_version()}".strip()

    def unavailable(self) -> str | None:
        return toolchain.problem()

    def supports(self, workload: Workload) -> bool:
        return bool(_lowerings(workload))

    def candidates(self, workload: Workload) -> Sequence[Config]:
        return [{"lowering": lowering} for lowering in _lowerings(workload)]

    def warm_up(self) -> None:
        """Compile something small: the first compilation on a machine precompiles PyTorch's headers, for some half a minute."""
        spec = TensorSpec("float32", (16,), (1,))
        relu = Operator("aten.relu.default", (In(0),))
        lower.build(Workload((relu,), (spec,), (Out(0),), (spec,)), "default")

    def build(self, workload: Workload, config: Config) -> Kernel:
        offered = _lowerings(workload)
        if not offered:
            raise Unsupported(f"Inductor generates no code for {workload.op} with these specs")
        check_keys(config, ("lowering",))
        return lower.build(workload, choice(config, "lowering", offered))

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        """How the workload is lowered."""
        del workload
        return {
            "broadcast": float(config.get("lowering") == "broadcast"),
            "template": float(config.get("lowering") == "template"),
        }


def _lowerings(workload: Workload) -> tuple[str, ...]:
    """What can be asked of Inductor for the workload; empty where it would only call PyTorch's kernels."""
    product = Product.of(workload)
    if product is not None:
        return ("template", "broadcast") if product.size <= _PRODUCT_LIMIT else ()
    if workload.op in UPDATES:
        count = workload.operators[0].args[0]
        return ("default",) if isinstance(count, tuple) and len(count) <= _PARAMETER_LIMIT else ()
    if workload.mutates or any(not spec.numel for spec in (*workload.inputs, *workload.results)):
        return ()
    return () if all(operator.op.startswith(_NOT_LOWERED) for operator in workload.operators) else ("default",)
