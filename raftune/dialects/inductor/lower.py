"""From a workload to compiled code: an aten graph with Inductor's decompositions, compiled without guards around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raftune.dialects.base import BuildError, Kernel, Unsupported
from raftune.dialects.calls import conform_all
from raftune.dialects.inductor.update import UPDATES
from raftune.dialects.products import Product
from raftune.workload import Arg, In, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# One kernel at a time in this process: no pool of compiler processes that outlives a worker; and no checks of sizes at
# every call, which the contract of a kernel makes unnecessary.
_BASE_OPTIONS: dict[str, Any] = {
    "compile_threads": 1,
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "freezing": False,
    "triton.cudagraphs": False,
    "keep_output_stride": True,
}
_TEMPLATE_OPTIONS: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}


def build(workload: Workload, lowering: str) -> Kernel:
    """Compile ``workload``; raises :class:`BuildError` with the compiler's message.

    ``lowering``: ``default``, ``broadcast`` (a product as a sum of element-wise products) or ``template`` (a product through
    Inductor's C++ matrix template).
    """
    import torch
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from raftune.dialects.torch_ops import dtype_of

    options = {**_BASE_OPTIONS, **(_TEMPLATE_OPTIONS if lowering == "template" else {})}
    # The sizes are all static; without a shape environment Inductor bypasses its cache on disk.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fakes = [torch.empty_strided(s.shape, s.stride, dtype=dtype_of(s.dtype)) for s in workload.inputs]
    try:
        with torch.no_grad(), config.patch(options), torch.inference_mode(False):
            graph = make_fx(_function(workload, lowering), dict(select_decomp_table()), tracing_mode="fake")(*fakes)
            _check_results(graph, workload)
            with tracing(TracingContext(mode)):
                compiled = compile_fx_inner(graph, fakes, is_inference=True)
    except BuildError:
        raise
    except Exception as error:  # the compiler's own errors are of many types: each means that this candidate does not exist
        raise BuildError(
            f"Inductor: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        ) from error
    source = getattr(compiled, "source_code", "") or ""
    if "cpp_fused" not in source and "cpp_Cpp" not in source:
        raise Unsupported(f"Inductor generates no code for {workload.op}: it would call PyTorch's own kernel")
    return _kernel(workload, compiled)


def _function(workload: Workload, lowering: str) -> Callable[..., tuple[Any, ...]]:
    from raftune.dialects.torch_ops import graph_module

    if workload.op in UPDATES and len(workload.operators) == 1:
        return _update(workload)
    if lowering in ("broadcast", "template"):
        product = Product.of(workload)
        if product is None:
            raise BuildError(f"config lowering={lowering!r} is for matrix products, not {workload.op}")
        return _product(product, lowering)
    region = graph_module(workload)
    if len(workload.outputs) == 1:
        return lambda *inputs: (region(*inputs),)
    return lambda *inputs: tuple(region(*inputs))


def _product(product: Product, lowering: str) -> Callable[..., tuple[Tensor]]:
    import torch

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        if lowering == "broadcast":
            return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
        # The template for plain matrices wants a constant one; that for batches does not.
        return torch.bmm(a, b) if product.batch is not None else torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)

    def function(*inputs: Tensor) -> tuple[Tensor]:
        out = multiply(inputs[product.a], inputs[product.b])
        if product.bias is None:
            return (out,)
        scaled = out if product.alpha == 1 else out * product.alpha
        bias = inputs[product.bias]
        return (scaled if product.beta == 0 else scaled + (bias if product.beta == 1 else bias * product.beta),)

    return function


def _update(workload: Workload) -> Callable[..., tuple[()]]:
    operator = workload.operators[0]
    formula = UPDATES[operator.op]
    if not {name for name, _ in operator.kwargs}.isdisjoint({"grad_scale", "found_inf"}):
        raise Unsupported("an optimizer update with grad_scale or found_inf")

    def value(arg: Arg, inputs: tuple[Tensor, ...]) -> Any:
        if isinstance(arg, tuple):
            return [value(a, inputs) for a in arg]
        return inputs[arg.index] if isinstance(arg, In) else arg

    def function(*inputs: Tensor) -> tuple[()]:
        words: Mapping[str, Any] = {name: value(arg, inputs) for name, arg in operator.kwargs}
        for target, new in formula(*[value(a, inputs) for a in operator.args], **words):
            target.copy_(new)
        return ()

    return function


def _check_results(graph: torch.fx.GraphModule, workload: Workload) -> None:
    """Ask for PyTorch's strides on every result; a result that is an input would not be fresh memory."""
    output = graph.graph.find_nodes(op="output")[0]
    if any(node.op == "placeholder" for node in output.args[0]):
        raise Unsupported(f"Inductor would return an input of {workload.op} itself")
    output.meta["user_visible_output_idxs"] = list(range(len(workload.outputs)))


def _kernel(workload: Workload, compiled: Any) -> Kernel:
    call: Callable[[list[Tensor]], Sequence[Tensor]] = compiled.current_callable
    count = len(workload.outputs)

    def bare(*inputs: Tensor) -> Tensor:
        return call(list(inputs))[0]

    def several(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(list(inputs)))

    kernel: Kernel = bare if count == 1 else several
    strides = [tuple(map(int, stride)) for stride in compiled.output_strides or () if stride is not None]
    return kernel if strides == [spec.stride for spec in workload.results] else conform_all(workload, kernel)
