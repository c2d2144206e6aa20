"""Any operator on other memory: inputs copied to contiguous first, or images moved between channel orders and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import FLOATS, check_keys, choice, conform_all, direct
from raftune.dialects.convolutions import LAYOUTS, is_channels_last, memory_format
from raftune.workload import Config, TensorSpec, Workload

if TYPE_CHECKING:
    from torch import Tensor

# Operators that read images window by window or channel by channel, so that the order of channels changes their loops.
_IMAGE_OPS = frozenset(
    {
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.max_pool2d_with_indices.default",
        "aten.max_pool2d_with_indices_backward.default",
        "aten.avg_pool2d.default",
        "aten.avg_pool2d_backward.default",
        "aten._adaptive_avg_pool2d.default",
        "aten._adaptive_avg_pool2d_backward.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten.native_batch_norm_backward.default",
        "aten.native_group_norm.default",
        "aten.native_group_norm_backward.default",
        "aten.upsample_nearest2d.vec",
        "aten.upsample_bilinear2d.vec",
    }
)
# Copying first only moves the same reads elsewhere for operators that touch every element once.
_REREADING_OPS = frozenset(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        "aten.native_layer_norm.default",
        "aten.native_layer_norm_backward.default",
        "aten._softmax.default",
        "aten._log_softmax.default",
        "aten._softmax_backward_data.default",
        "aten._log_softmax_backward_data.default",
        "aten.sum.dim_IntList",
        "aten.mean.dim",
        "aten.var_mean.correction",
        "aten.embedding_dense_backward.default",
    }
)


def configs(workload: Workload) -> list[Config]:
    if len(workload.operators) != 1 or workload.mutates:
        return []
    found: list[Config] = []
    if workload.op in _REREADING_OPS:
        scattered = [i for i, spec in enumerate(workload.inputs) if _scattered(spec)]
        found.extend({"formulation": "contiguous", "inputs": [i]} for i in scattered)
        if len(scattered) > 1:
            found.append({"formulation": "contiguous", "inputs": scattered})
    if workload.op in _IMAGE_OPS:
        images = [spec for spec in workload.inputs if len(spec.shape) == 4]
        present = "channels_last" if any(map(is_channels_last, images)) else "contiguous"
        if images:
            found.append({"formulation": "memory", "layout": LAYOUTS[1 - LAYOUTS.index(present)]})
    return found


def build_contiguous(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation", "inputs"))
    chosen = config.get("inputs")
    count = len(workload.inputs)
    if not isinstance(chosen, list | tuple) or not all(type(i) is int and 0 <= i < count for i in chosen):
        raise BuildError(f"config inputs={chosen!r}: expected input numbers below {count}")
    return _converted(workload, dict.fromkeys(chosen, memory_format(0, "contiguous")))


def build_memory(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation", "layout"))
    layout = choice(config, "layout", LAYOUTS)
    images = [i for i, spec in enumerate(workload.inputs) if len(spec.shape) == 4]
    if not images:
        raise BuildError(f"config layout={layout!r} needs an input of rank 4, {workload.op} has none")
    return _converted(workload, dict.fromkeys(images, memory_format(2, layout)))


def _converted(workload: Workload, formats: dict[int, Any]) -> Kernel:
    if workload.mutates:
        raise BuildError(f"{workload.op} updates its inputs in place: they cannot be copied first")
    inner = direct(workload)
    plan = list(formats.items())

    def kernel(*inputs: Tensor) -> object:
        values = list(inputs)
        for i, wanted in plan:
            values[i] = values[i].contiguous(memory_format=wanted)
        return inner(*values)

    return conform_all(workload, kernel)


def _scattered(spec: TensorSpec) -> bool:
    return spec.dtype in FLOATS and spec.numel > 0 and not spec.is_contiguous
