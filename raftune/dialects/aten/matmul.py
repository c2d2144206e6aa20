"""Formulations of a matrix product: memory order of the operands and of the result, splits, and products as other operators.

A BLAS picks its kernel by the order of all three matrices, and the picks differ in speed by tens of percent and more on skinny
shapes; a copy that puts a matrix into the better order often costs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import check_keys, choice, conform, conform_all
from raftune.dialects.products import Product, add_bias, layouts, relayout
from raftune.workload import Config, Workload

if TYPE_CHECKING:
    from torch import Tensor

Multiply = Callable[["Tensor", "Tensor"], "Tensor"]

_ORDERS = ("row", "column")
# Elements of the temporary that the broadcast formulation makes: it must stay in the first-level caches to have a chance.
_BROADCAST_LIMIT = 1 << 14
_LOOP_LIMIT = 64
_PARTS = (4, 16)


def configs(workload: Workload) -> list[Config]:
    """The alternatives that make sense for the specs, cheapest extra copies first."""
    product = Product.of(workload)
    if product is None:
        return []
    found: list[Config] = [*_layout_configs(product)]
    for name, applies in _APPLIES.items():
        if applies(product):
            found.append({"formulation": name})
    found.extend({"formulation": "split_k", "parts": parts} for parts in _PARTS if _splits(product, parts))
    return found


def build(workload: Workload, config: Config) -> Kernel:
    product = Product.of(workload)
    if product is None:
        raise BuildError(f"config formulation={config['formulation']!r} is for matrix products, not {workload.op}")
    if config["formulation"] == "layout":
        return _build_layout(product, config)
    if config["formulation"] == "split_k":
        check_keys(config, ("formulation", "parts"))
        parts = config.get("parts")
        if not isinstance(parts, int) or parts < 2 or product.k % parts or product.batch is not None:
            raise BuildError(f"config parts={parts!r} does not divide the contraction of {product.k} of a plain product")
        multiply = _split_k(product, parts)
    else:
        check_keys(config, ("formulation",))
        name = choice(config, "formulation", tuple(_APPLIES))
        if not _APPLIES[name](product):
            raise BuildError(f"config formulation={name!r} does not apply to {product.m}x{product.k} @ {product.k}x{product.n}")
        multiply = _MULTIPLY[name](product)
    return conform_all(workload, add_bias(product, multiply))


def features(workload: Workload, config: Config) -> dict[str, float]:
    """What a change of layouts costs: elements copied (log2), of which matrix, and whether the result is transposed."""
    product = Product.of(workload)
    if product is None or config.get("formulation") != "layout":
        return {"copied": 0.0, "swap": 0.0}
    moved = [
        spec.numel * (layout != layouts(spec)[0])
        for spec, layout in ((product.left, config.get("a")), (product.right, config.get("b")))
    ]
    swapped = config.get("result") == "column"
    return {
        "copied": math.log2(1 + sum(moved) + swapped * product.result.numel),
        "copied_a": math.log2(1 + moved[0]),
        "copied_b": math.log2(1 + moved[1]),
        "swap": float(swapped),
    }


def _layout_configs(product: Product) -> list[Config]:
    present = (layouts(product.left)[0], layouts(product.right)[0], "row")
    found: list[tuple[int, Config]] = []
    for a in layouts(product.left):
        for b in layouts(product.right):
            for result in _ORDERS if min(product.m, product.n) > 1 else ("row",):
                cost = (
                    product.left.numel * (a != present[0])
                    + product.right.numel * (b != present[1])
                    + product.result.numel * (result != "row")
                )
                config = {"formulation": "layout", "a": a, "b": b, "result": result}
                if product.bias is None:
                    if cost:
                        found.append((cost, config))
                    continue
                if cost:
                    found.append((cost, {**config, "bias": "beta"}))
                if cost <= product.result.numel:
                    found.append((cost + product.result.numel, {**config, "bias": "add"}))
    return [config for _, config in sorted(found, key=lambda item: item[0])]


def _build_layout(product: Product, config: Config) -> Kernel:
    import torch

    with_bias = product.bias is not None
    check_keys(config, ("formulation", "a", "b", "result", *(("bias",) if with_bias else ())))
    change_a = relayout(product.left, choice(config, "a", _ORDERS)) or _same
    change_b = relayout(product.right, choice(config, "b", _ORDERS)) or _same
    swapped = choice(config, "result", _ORDERS) == "column"
    batched = product.batch is not None
    matmul = torch.bmm if batched else torch.mm
    to_result = conform(product.result)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return matmul(change_a(a), change_b(b))

    def multiply_swapped(a: Tensor, b: Tensor) -> Tensor:
        return to_result(matmul(change_b(b).mT, change_a(a).mT).mT)

    if not with_bias or choice(config, "bias", ("beta", "add")) == "add":
        return conform_all(product.workload, add_bias(product, multiply_swapped if swapped else multiply))

    fused = torch.baddbmm if batched else torch.addmm
    a_at, b_at, bias_at = product.a, product.b, product.bias
    alpha, beta, shape = product.alpha, product.beta, product.result.shape
    assert bias_at is not None

    def with_beta(*inputs: Tensor) -> Tensor:
        return fused(inputs[bias_at], change_a(inputs[a_at]), change_b(inputs[b_at]), beta=beta, alpha=alpha)

    def with_beta_swapped(*inputs: Tensor) -> Tensor:
        bias = inputs[bias_at].expand(shape).mT
        return to_result(fused(bias, change_b(inputs[b_at]).mT, change_a(inputs[a_at]).mT, beta=beta, alpha=alpha).mT)

    return conform_all(product.workload, with_beta_swapped if swapped else with_beta)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _splits(product: Product, parts: int) -> bool:
    """Long contraction, small result: parts of it are a batch of products that reuse one small block each."""
    return (
        product.batch is None
        and product.k % parts == 0
        and product.k // parts >= 64
        and product.k >= 4 * max(product.m, product.n)
    )


def _split_k(product: Product, parts: int) -> Multiply:
    import torch

    sizes = (parts, product.k // parts)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(torch.unflatten(a, 1, sizes).transpose(0, 1), torch.unflatten(b, 0, sizes)).sum(0)

    return multiply


def _folds(product: Product) -> bool:
    """One right matrix for the whole batch: the batch is more rows of a single product."""
    return product.batch is not None and (product.batch == 1 or product.right.stride[0] == 0)


_APPLIES: dict[str, Callable[[Product], bool]] = {
    "vector": lambda p: p.batch is None and min(p.m, p.n) == 1,
    "outer": lambda p: p.k == 1,
    "fold": _folds,
    "bmm": lambda p: p.batch is None,
    "broadcast": lambda p: p.k > 1 and p.size <= _BROADCAST_LIMIT,
    "loop": lambda p: p.batch is not None and 1 < p.batch <= _LOOP_LIMIT,
}


def _vector(product: Product) -> Multiply:
    import torch

    if product.n == 1:
        return lambda a, b: torch.mv(a, b.select(1, 0)).unsqueeze(1)
    return lambda a, b: torch.mv(b.mT, a.select(0, 0)).unsqueeze(0)


def _outer(product: Product) -> Multiply:
    import torch

    del product
    return torch.mul


def _fold(product: Product) -> Multiply:
    import torch

    rows, k, shape = (product.batch or 1) * product.m, product.k, product.result.shape
    return lambda a, b: torch.mm(a.reshape(rows, k), b.select(0, 0)).view(shape)


def _bmm(product: Product) -> Multiply:
    import torch

    del product
    return lambda a, b: torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def _broadcast(product: Product) -> Multiply:
    del product
    return lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def _loop(product: Product) -> Multiply:
    import torch

    from raftune.dialects.torch_ops import dtype_of

    shape, dtype, mm = product.result.shape, dtype_of(product.result.dtype), torch.mm

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        for left, right, into in zip(a.unbind(0), b.unbind(0), out.unbind(0), strict=True):
            mm(left, right, out=into)
        return out

    return multiply


_MULTIPLY: dict[str, Callable[[Product], Multiply]] = {
    "vector": _vector,
    "outer": _outer,
    "fold": _fold,
    "bmm": _bmm,
    "broadcast": _broadcast,
    "loop": _loop,
}
