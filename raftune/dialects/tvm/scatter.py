"""The gradient of an embedding's table, made directly in TIR: rows are added where the indices say, one after the other.

Every thread adds its share of the columns, so that equal indices need no locks and sums are in the order of the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftune.dialects.calls import Call
from raftune.dialects.tvm.layout import fits
from raftune.workload import Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.target import HostTarget

_OP = "aten.embedding_dense_backward.default"
_DTYPES = {"float32": 4, "float64": 8}


def supports(workload: Workload) -> bool:
    """Whether the workload is such a gradient, of contiguous tensors and not scaled by how often an index occurs."""
    call = Call.of(workload)
    if call is None or call.op != _OP or len(workload.results) != 1 or call.flag(4, "scale_grad_by_freq"):
        return False
    gradient, indices = call.tensor(0, "grad_output"), call.tensor(1, "indices")
    if gradient is None or indices is None:
        return False
    specs = (workload.inputs[gradient], workload.inputs[indices], *workload.results)
    if specs[0].dtype not in _DTYPES or specs[1].dtype not in ("int64", "int32"):
        return False
    return all(fits(spec) and spec.is_contiguous for spec in specs)


def module(workload: Workload, host: HostTarget, threads: int) -> Any:
    """The TIR module, whose ``main`` takes the workload's inputs and its result."""
    import tvm
    from tvm import tirx

    call = Call.of(workload)
    assert call is not None
    gradient_at, indices_at = call.tensor(0, ""), call.tensor(1, "")
    assert gradient_at is not None
    assert indices_at is not None
    gradient, result = workload.inputs[gradient_at], workload.results[0]
    tokens, (rows, columns) = workload.inputs[indices_at].numel, result.shape
    padding = call.number(3, "padding_idx", -1)
    lanes = host.lanes(_DTYPES[gradient.dtype])

    def buffer(shape: tuple[int, ...], dtype: str, name: str) -> Any:
        # At any address: a view may start wherever an element does.
        size = 8 if dtype.endswith("64") else 4
        return tirx.decl_buffer(shape, dtype, name, data_alignment=size)

    def loop(variable: Any, extent: int, body: Any, kind: Any = tirx.ForKind.SERIAL) -> Any:
        return tirx.For(variable, tirx.const(0, "int64"), tirx.const(extent, "int64"), kind, body)

    inputs = [buffer(spec.shape, spec.dtype, f"x{i}") for i, spec in enumerate(workload.inputs)]
    out = buffer(result.shape, result.dtype, "out")
    flat_gradient = buffer((tokens, columns), gradient.dtype, "gradient")
    flat_indices = buffer((tokens,), workload.inputs[indices_at].dtype, "indices")
    declared = [
        tirx.DeclBuffer(flat_gradient, data=inputs[gradient_at].data),
        tirx.DeclBuffer(flat_indices, data=inputs[indices_at].data),
    ]
    share, zero = tirx.Var("share", "int64"), tirx.const(0, result.dtype)
    vectors, rest = divmod(columns, lanes)
    per_thread = -(-vectors // threads)

    def across(store: Any) -> Any:
        """``store`` for every column of this thread: whole vectors, and by the first thread what is left."""
        parts = []
        if vectors:
            outer, lane = tirx.Var("i", "int64"), tirx.Var("lane", "int64")
            at = share * per_thread + outer
            inner = loop(lane, lanes, store(at * lanes + lane), tirx.ForKind.VECTORIZED)
            if vectors % threads:
                inner = tirx.IfThenElse(at < vectors, inner, None)
            parts.append(loop(outer, per_thread, inner))
        if rest:
            last = tirx.Var("i", "int64")
            parts.append(tirx.IfThenElse(share == 0, loop(last, rest, store(vectors * lanes + last)), None))
        return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]

    row, token = tirx.Var("row", "int64"), tirx.Var("token", "int64")
    index = flat_indices[token].astype("int64")
    cleared = loop(row, rows, across(lambda c: tirx.BufferStore(out, zero, [row, c])))
    added = across(lambda c: tirx.BufferStore(out, out[index, c] + flat_gradient[token, c], [index, c]))
    if padding >= 0:
        added = tirx.IfThenElse(index != tirx.const(int(padding), "int64"), added, None)
    work = tirx.SeqStmt([*declared, cleared, loop(token, tokens, added)])
    body = loop(share, threads, work, tirx.ForKind.PARALLEL if threads > 1 else tirx.ForKind.SERIAL)
    function = tirx.PrimFunc([*inputs, out], body).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})
