"""Optimizer updates as one function that writes in place, made directly in TIR: tensor expressions have no memory to update.

All tensors of a parameter are walked once, in the order in which they lie in memory; every thread takes its share of every
parameter. What depends on the step's number is computed in double precision, as PyTorch does. Formulas: Kingma and Ba, arXiv
1412.6980; Loshchilov and Hutter, arXiv 1711.05101; Sutskever et al., ICML 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftune.dialects.calls import Call
from raftune.dialects.tvm.layout import dense_view, fits, is_permuted_dense
from raftune.workload import In, TensorSpec, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.target import HostTarget

_ADAM, _ADAMW, _SGD = (f"aten._fused_{name}_.tensor_lr" for name in ("adam", "adamw", "sgd"))
# Lists of tensors, one of each for every parameter, by position.
_LISTS = {
    _ADAM: ("param", "grad", "average", "square", "maximum"),
    _ADAMW: ("param", "grad", "average", "square", "maximum"),
    _SGD: ("param", "grad", "buffer"),
}
_STEPS_AT = 5
_DTYPES = ("float32", "float64")
# Each parameter costs LLVM a fifth of a second, most of it for the checks of its tensors.
_PARAMETER_LIMIT = 64


@dataclass(frozen=True, slots=True)
class _Parameter:
    """Input numbers of a parameter's tensors by role, and of its step count."""

    tensors: dict[str, int]
    step: int | None


def supports(workload: Workload) -> bool:
    """Whether the workload is an update without gradient scaling whose tensors lie alike, parameter by parameter."""
    call = Call.of(workload)
    if call is None or call.op not in _LISTS or workload.results:
        return False
    if _keyword(call, "grad_scale") is not None or _keyword(call, "found_inf") is not None:
        return False
    rate = _keyword(call, "lr")
    parameters = _parameters(call)
    if not 0 < len(parameters) <= _PARAMETER_LIMIT or not isinstance(rate, In | float | int):
        return False
    specs = workload.inputs
    for parameter in parameters:
        first, *others = (specs[at] for at in parameter.tensors.values())
        alike = all((s.dtype, s.shape, s.stride) == (first.dtype, first.shape, first.stride) for s in others)
        if not alike or first.dtype not in _DTYPES or not fits(first) or not is_permuted_dense(first):
            return False
    singles = [p.step for p in parameters if p.step is not None] + ([rate.index] if isinstance(rate, In) else [])
    return all(specs[at].numel == 1 and specs[at].dtype in _DTYPES for at in singles)


def module(workload: Workload, host: HostTarget, threads: int) -> Any:
    """The TIR module, whose ``main`` takes the workload's inputs as dense tensors."""
    import tvm
    from tvm import tirx

    call = Call.of(workload)
    assert call is not None
    writer = _Writer(call, workload.inputs, host, threads)
    function = tirx.PrimFunc(writer.buffers, writer.body()).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


class _Writer:
    """Makes the statements of one update."""

    def __init__(self, call: Call, specs: Sequence[TensorSpec], host: HostTarget, threads: int) -> None:
        from tvm import tirx

        self._tirx = tirx
        self._call, self._specs, self._host, self._threads = call, specs, host, threads
        self.buffers = [self._buffer(dense_view(spec).shape, spec.dtype, f"x{i}") for i, spec in enumerate(specs)]
        self._statements: list[Any] = []

    def _buffer(self, shape: tuple[int, ...], dtype: str, name: str) -> Any:
        """A tensor at any address: a view may start wherever an element does."""
        return self._tirx.decl_buffer(shape, dtype, name, data_alignment=8 if dtype == "float64" else 4)

    def body(self) -> Any:
        tirx = self._tirx
        self._rate = self._number("lr")
        parameters = _parameters(self._call)
        scalars = [self._scalars(parameter) for parameter in parameters]
        if self._threads == 1:
            for parameter, values in zip(parameters, scalars, strict=True):
                self._statements += self._loops(parameter, values, None)
            return tirx.SeqStmt(self._statements)
        share = tirx.Var("share", "int64")
        inside: list[Any] = []
        for parameter, values in zip(parameters, scalars, strict=True):
            inside += self._loops(parameter, values, share)
        team = self._for(share, self._threads, tirx.SeqStmt(inside), tirx.ForKind.PARALLEL)
        return tirx.SeqStmt([*self._statements, team])

    def _loops(self, parameter: _Parameter, scalars: dict[str, Any], share: Any | None) -> list[Any]:
        """Whole vectors first, of which a thread takes its share; then what is left, by the first thread."""
        tirx = self._tirx
        spec = self._specs[parameter.tensors["param"]]
        lanes = self._host.lanes(8 if spec.dtype == "float64" else 4)
        flat, declared = {}, []
        for role, at in parameter.tensors.items():
            flat[role] = self._buffer((spec.numel,), spec.dtype, f"{role}{at}")
            declared.append(tirx.DeclBuffer(flat[role], data=self.buffers[at].data))
        vectors, rest = divmod(spec.numel, lanes)
        found = []
        if vectors:
            outer, lane = tirx.Var("i", "int64"), tirx.Var("lane", "int64")
            per_thread = -(-vectors // self._threads)
            at = outer if share is None else share * per_thread + outer
            inner = self._for(lane, lanes, self._update(flat, at * lanes + lane, scalars), tirx.ForKind.VECTORIZED)
            if share is not None and vectors % self._threads:
                inner = tirx.IfThenElse(at < vectors, inner, None)
            found.append(self._for(outer, per_thread, inner, tirx.ForKind.SERIAL))
        if rest:
            last = tirx.Var("i", "int64")
            tail = self._for(last, rest, self._update(flat, vectors * lanes + last, scalars), tirx.ForKind.SERIAL)
            found.append(tail if share is None else tirx.IfThenElse(share == 0, tail, None))
        return [*declared, *found]

    def _for(self, variable: Any, extent: int, body: Any, kind: Any) -> Any:
        tirx = self._tirx
        return tirx.For(variable, tirx.const(0, "int64"), tirx.const(extent, "int64"), kind, body)

    def _number(self, name: str) -> Any:
        """A keyword's value in double precision, read once if it is a tensor."""
        value = _keyword(self._call, name)
        return self._read(value.index) if isinstance(value, In) else self._tirx.const(float(value), "float64")

    def _read(self, at: int) -> Any:
        buffer = self.buffers[at]
        return self._bound(f"s{at}", buffer[(0,) * len(buffer.shape)].astype("float64"))

    def _bound(self, name: str, value: Any) -> Any:
        variable = self._tirx.Var(name, "float64")
        self._statements.append(self._tirx.Bind(variable, value))
        return variable

    def _scalars(self, parameter: _Parameter) -> dict[str, Any]:
        """What is the same for all elements of a parameter."""
        tirx = self._tirx
        one = tirx.const(1.0, "float64")
        if parameter.step is None:
            return {"rate": self._rate}
        step, name = self._read(parameter.step), f"{parameter.step}"
        corrections = {}
        for key in ("beta1", "beta2"):
            corrections[key] = one - tirx.pow(self._number(key), step)
        return {
            "step_size": self._bound(f"size{name}", self._rate / corrections["beta1"]),
            "root": self._bound(f"root{name}", tirx.sqrt(corrections["beta2"])),
            "kept": self._bound(f"kept{name}", one - self._rate * self._number("weight_decay")),
        }

    def _update(self, flat: dict[str, Any], at: Any, scalars: dict[str, Any]) -> Any:
        return (self._sgd if self._call.op == _SGD else self._adam)(flat, at, scalars)

    def _adam(self, flat: dict[str, Any], at: Any, scalars: dict[str, Any]) -> Any:
        tirx, dtype = self._tirx, flat["param"].dtype

        def constant(value: float) -> Any:
            return tirx.const(value, dtype)

        def scalar(name: str) -> Any:
            return scalars[name].astype(dtype)

        beta1, beta2, decay, eps = (float(_keyword(self._call, n)) for n in ("beta1", "beta2", "weight_decay", "eps"))
        param, average, square = flat["param"][at], flat["average"][at], flat["square"][at]
        gradient = -flat["grad"][at] if _keyword(self._call, "maximize") else flat["grad"][at]
        if decay and self._call.op == _ADAM:
            gradient = gradient + constant(decay) * param
        kept = param * scalar("kept") if decay and self._call.op == _ADAMW else param
        # Stored before they are read again: what is stored is what counts.
        stores = [
            tirx.BufferStore(flat["average"], average + (gradient - average) * constant(1 - beta1), [at]),
            tirx.BufferStore(flat["square"], square * constant(beta2) + gradient * gradient * constant(1 - beta2), [at]),
        ]
        bound = square
        if "maximum" in flat:
            stores.append(tirx.BufferStore(flat["maximum"], tirx.max(flat["maximum"][at], square), [at]))
            bound = flat["maximum"][at]
        denominator = tirx.sqrt(bound) / scalar("root") + constant(eps)
        stores.append(tirx.BufferStore(flat["param"], kept - scalar("step_size") * average / denominator, [at]))
        return tirx.SeqStmt(stores)

    def _sgd(self, flat: dict[str, Any], at: Any, scalars: dict[str, Any]) -> Any:
        tirx, dtype = self._tirx, flat["param"].dtype
        decay, momentum, dampening = (float(_keyword(self._call, n)) for n in ("weight_decay", "momentum", "dampening"))
        param = flat["param"][at]
        gradient = -flat["grad"][at] if _keyword(self._call, "maximize") else flat["grad"][at]
        if decay:
            gradient = gradient + tirx.const(decay, dtype) * param
        stores = []
        if "buffer" in flat and momentum:
            buffer = flat["buffer"][at]
            first = _keyword(self._call, "is_first_step")
            moved = gradient if first else buffer * tirx.const(momentum, dtype) + gradient * tirx.const(1 - dampening, dtype)
            stores.append(tirx.BufferStore(flat["buffer"], moved, [at]))
            gradient = gradient + tirx.const(momentum, dtype) * buffer if _keyword(self._call, "nesterov") else buffer
        stores.append(tirx.BufferStore(flat["param"], param - scalars["rate"].astype(dtype) * gradient, [at]))
        return tirx.SeqStmt(stores) if len(stores) > 1 else stores[0]


def _parameters(call: Call) -> list[_Parameter]:
    groups = {role: _group(call, at) for at, role in enumerate(_LISTS[call.op])}
    groups = {role: indices for role, indices in groups.items() if indices}
    steps = _group(call, _STEPS_AT) if call.op != _SGD else []
    counts = {len(indices) for indices in groups.values()} | ({len(steps)} if call.op != _SGD else set())
    if len(counts) != 1 or "grad" not in groups:
        return []
    return [
        _Parameter({role: indices[i] for role, indices in groups.items()}, steps[i] if steps else None)
        for i in range(counts.pop())
    ]


def _group(call: Call, position: int) -> list[int]:
    value = call.arg(position, "")
    return [a.index for a in value if isinstance(a, In)] if isinstance(value, tuple) else []


def _keyword(call: Call, name: str) -> Any:
    return call.arg(len(call.operator.args), name)
