"""Products and convolutions with what follows them, in PyTorch's own operators: accumulated into the summand, done in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import FLOATS, check_keys, choice, conform, direct
from raftune.dialects.epilogue import Epilogue
from raftune.dialects.products import Product
from raftune.workload import Config, Workload

if TYPE_CHECKING:
    from torch import Tensor

# The BLAS adds its product to the summand; or every operator writes over what the one before it gave.
_NAMES = ("accumulate", "in_place")


def configs(workload: Workload) -> list[Config]:
    epilogue = _epilogue(workload)
    if epilogue is None:
        return []
    return [{"formulation": name} for name in _NAMES if name != "accumulate" or _accumulates(epilogue)]


def build(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation",))
    epilogue = _epilogue(workload)
    name = choice(config, "formulation", _NAMES)
    if epilogue is None:
        raise BuildError(f"config formulation={name!r} is for a product or convolution and an epilogue, not {workload.op}")
    if name == "accumulate":
        if not _accumulates(epilogue):
            raise BuildError(f"config formulation={name!r} needs a product and a summand that a BLAS can add to")
        return _accumulated(epilogue)
    core, fix = direct(epilogue.core), conform(epilogue.core.results[0])
    return epilogue.after(lambda *inputs: fix(core(*inputs)))


def _epilogue(workload: Workload) -> Epilogue | None:
    if len(workload.operators) == 1 or not workload.inputs[0].numel or workload.inputs[0].dtype not in FLOATS:
        return None
    return Epilogue.of(workload)


def _accumulates(epilogue: Epilogue) -> bool:
    """Whether the summand can be brought to the product's own shape: there are no views, or it is a whole matrix or one row."""
    if epilogue.addend is None or Product.of(epilogue.core) is None:
        return False
    own, spec = epilogue.core.results[0].shape, epilogue.core.inputs[epilogue.addend]
    is_row = spec.numel == own[-1] and spec.shape[-1:] == epilogue.shape[-1:] == own[-1:]
    return epilogue.shape in (own, spec.shape) or is_row


def _accumulated(epilogue: Epilogue) -> Kernel:
    import torch

    product = Product.of(epilogue.core)
    assert product is not None
    assert epilogue.addend is not None
    a, b, bias, addend, shape = product.a, product.b, product.bias, epilogue.addend, product.result.shape
    fused = torch.addmm if product.batch is None else torch.baddbmm
    alpha, beta, scale = epilogue.alpha * product.alpha, epilogue.beta, epilogue.alpha * product.beta
    reshapes = epilogue.core.inputs[addend].shape == epilogue.shape != shape
    vector = epilogue.shape != shape and not reshapes

    def summand(inputs: tuple[Tensor, ...]) -> Tensor:
        value = inputs[addend]
        return value.reshape(shape) if reshapes else value.reshape(shape[-1]) if vector else value

    def kernel(*inputs: Tensor) -> Tensor:
        if bias is None:
            return fused(summand(inputs), inputs[a], inputs[b], beta=beta, alpha=alpha)
        start = torch.add(summand(inputs) if beta == 1 else summand(inputs) * beta, inputs[bias], alpha=scale)
        return fused(start, inputs[a], inputs[b], alpha=alpha)

    return epilogue.without("scale", "addend").after(kernel)
