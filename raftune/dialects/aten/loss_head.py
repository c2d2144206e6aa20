"""The end of a classifier (linear layer, log-softmax, negative log likelihood, and their gradients) in blocks of rows.

Eager writes and reads the logits, their log-softmax and both gradients in full; those of one block stay in the cache. The
gradient of the logits is softmax minus one at the target, so that of the log-softmax is never made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import check_keys, choice, conform_all
from raftune.dialects.chains import RESHAPES, Chains
from raftune.pattern import ANY, Pattern, either, op
from raftune.workload import Arg, Config, In, Operator, Out, Workload

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = (32, 64, 128, 256)
_DTYPES = ("float32", "float64")
_MEAN, _SUM = 1, 2
_VIEWS = (*RESHAPES, "aten.t.default")


def _patterns() -> tuple[Pattern, ...]:
    logits = either(op("aten.mm.default")(ANY, ANY), op("aten.addmm.default")(ANY, ANY, ANY))
    likelihoods = op("aten._log_softmax.default")(logits)
    loss = op("aten.nll_loss_forward.default")(likelihoods)
    gradient = op("aten.nll_loss_backward.default")(ANY, likelihoods, ANY, ANY, ANY, ANY, loss)
    of_logits = op("aten._log_softmax_backward_data.default")(gradient, likelihoods)
    product = op("aten.mm.default")
    beside = (product(of_logits, ANY), op("aten.sum.dim_IntList")(of_logits))
    return Pattern(product(of_logits, ANY), beside), Pattern(loss)


PATTERNS = _patterns()


def configs(workload: Workload) -> list[Config]:
    head = LossHead.of(workload)
    if head is None:
        return []
    return [{"formulation": "row_blocks", "rows": rows} for rows in (*(r for r in _ROWS if r < head.rows), head.rows)]


def build(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation", "rows"))
    name = choice(config, "formulation", ("row_blocks",))
    head, rows = LossHead.of(workload), config.get("rows")
    if head is None:
        raise BuildError(f"config formulation={name!r} is for a linear layer with its cross-entropy, not {workload.op}")
    if not isinstance(rows, int) or isinstance(rows, bool) or not 0 < rows <= head.rows:
        raise BuildError(f"config rows={rows!r}: expected a number from 1 to {head.rows}")
    return _kernel(head, rows)


@dataclass(frozen=True, slots=True)
class LossHead:
    """Input numbers and what is to be returned.

    ``x @ weight + bias`` are the logits, ``(rows, classes)``. With ``gradient``, that of the loss, and ``d``, that of the
    logits, ``of_input`` is ``d @ right``, ``of_weight`` is ``d.T @ left`` and ``of_bias`` is the sum of ``d`` over rows.
    ``results`` names one of these, ``logits``, ``loss`` or ``total`` (how many targets count) for each output of the workload.
    """

    workload: Workload
    inputs: dict[str, int]
    reduction: int
    ignored: int
    results: tuple[str, ...]

    @staticmethod
    def of(workload: Workload) -> LossHead | None:
        """``None`` unless the region is this and nothing else, and neither log-softmax nor its gradient is needed outside."""
        return _Reader(workload).head()

    @property
    def rows(self) -> int:
        return self.workload.inputs[self.inputs["x"]].shape[0]


class _Reader:
    """Names every operator of a region by its part in a loss head, in the region's order."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.chains = Chains(workload)
        self.nodes: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        self.loss: tuple[Arg, ...] = ()

    def head(self) -> LossHead | None:
        for node, call in enumerate(self.workload.operators):
            if call.op in _VIEWS:
                continue
            role = self._role(call)
            if role is None or role in self.nodes or dict(call.kwargs):
                return None
            self.nodes[role] = node
        if "loss" not in self.nodes or not self._is_regular():
            return None
        roles = {Out(node, 0): role for role, node in self.nodes.items()} | {Out(self.nodes["loss"], 1): "total"}
        results = tuple(roles[out] for out in self.workload.outputs)
        if not set(results) <= {"logits", "loss", "total", "of_input", "of_weight", "of_bias"}:
            return None
        reduction, ignored = self.loss[3], self.loss[4]
        if reduction not in (_MEAN, _SUM) or not isinstance(reduction, int) or not isinstance(ignored, int):
            return None
        return LossHead(self.workload, self.inputs, reduction, ignored, results)

    def _is_regular(self) -> bool:
        specs = {name: self.workload.inputs[i] for name, i in self.inputs.items()}
        floats = [spec for name, spec in specs.items() if name != "target"]
        rows = specs["x"].shape[0]
        return (
            all(spec.dtype == floats[0].dtype and spec.dtype in _DTYPES and spec.numel for spec in floats)
            and specs["target"].shape == (rows,)
            and ("bias" not in specs or specs["bias"].shape == specs["weight"].shape[1:])
            and ("gradient" not in specs or specs["gradient"].shape == ())
        )

    def _role(self, call: Operator) -> str | None:
        args = call.args
        match call.op:
            case "aten.mm.default" if self._takes(args, ("x", "weight")):
                return "logits"
            case "aten.addmm.default" if self._takes(args, ("bias", "x", "weight")):
                return "logits"
            case "aten._log_softmax.default" if self._is("logits", args[0]) and args[1] in (1, -1) and args[2:] == (False,):
                return "likelihoods"
            case "aten.nll_loss_forward.default" if self._is("likelihoods", args[0]) and args[2] is None:
                self.loss = args
                return "loss" if self._takes(args[1:2], ("target",)) else None
            case "aten.nll_loss_backward.default" if self._is("likelihoods", args[1]) and "loss" in self.nodes:
                same = args[2:6] == self.loss[1:5] and args[6] == Out(self.nodes["loss"], 1)
                return "of_likelihoods" if same and self._takes(args[:1], ("gradient",)) else None
            case "aten._log_softmax_backward_data.default" if self._is("of_likelihoods", args[0]):
                return "of_logits" if self._is("likelihoods", args[1]) and args[2] in (1, -1) else None
            case "aten.mm.default" if self._is("of_logits", args[0]) and self._takes(args[1:], ("right",)):
                return "of_input"
            case "aten.mm.default" if self._is_transposed("of_logits", args[0]) and self._takes(args[1:], ("left",)):
                return "of_weight"
            case "aten.sum.dim_IntList" if self._is("of_logits", args[0]) and args[1] == (0,):
                return "of_bias"
        return None

    def _takes(self, args: tuple[Arg, ...], names: tuple[str, ...]) -> bool:
        """Whether all of ``args`` are inputs; they are then known by ``names``."""
        if len(args) != len(names) or not all(isinstance(arg, In) for arg in args):
            return False
        self.inputs.update((name, arg.index) for name, arg in zip(names, args, strict=True) if isinstance(arg, In))
        return True

    def _is(self, role: str, value: Arg) -> bool:
        """Whether ``value`` is what ``role`` gives, perhaps through views, but with rows and classes where they were."""
        if role not in self.nodes or self.chains.behind(value) != Out(self.nodes[role]):
            return False
        return self.chains.shape(value) == self.chains.shape(Out(self.nodes[role]))

    def _is_transposed(self, role: str, value: Arg) -> bool:
        call = self.chains.operator(self.chains.behind(value))
        return call is not None and call.op == "aten.t.default" and self._is(role, call.args[0])


def _kernel(head: LossHead, rows: int) -> Kernel:
    at, results, blocks = head.inputs, head.results, -(-head.rows // rows)

    def kernel(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        step = _Step(head, {name: inputs[index] for name, index in at.items()}, rows)
        for block in range(blocks):
            step.run(slice(block * rows, min((block + 1) * rows, head.rows)))
        found = step.finished()
        return found[results[0]] if len(results) == 1 else tuple(found[name] for name in results)

    return conform_all(head.workload, kernel)


class _Step:
    """One call: what the blocks read, and what they write to or add to."""

    def __init__(self, head: LossHead, inputs: dict[str, Tensor], rows: int) -> None:
        import torch

        self.head, self.inputs = head, inputs
        x, weight, target = inputs["x"], inputs["weight"], inputs["target"]
        self.valid = target != head.ignored
        self.total = self.valid.sum().to(x.dtype)
        self.target = target.where(self.valid, 0).unsqueeze(1)
        self.loss = x.new_zeros(())
        classes = weight.shape[1]
        self.logits = x.new_empty(x.shape[0] if "logits" in head.results else rows, classes)
        self.gradients: dict[str, Tensor] = {}
        if "of_input" in head.results:
            self.gradients["of_input"] = x.new_empty(x.shape[0], inputs["right"].shape[1])
        if "of_weight" in head.results:
            self.gradients["of_weight"] = x.new_empty(classes, inputs["left"].shape[1])
        if "of_bias" in head.results:
            self.gradients["of_bias"] = x.new_zeros(classes)
        if "gradient" in inputs:
            factor = inputs["gradient"] / self.total if head.reduction == _MEAN else inputs["gradient"]
            self.factors = torch.where(self.valid, factor, 0.0).unsqueeze(1)

    def run(self, rows: slice) -> None:
        import torch

        x, weight = self.inputs["x"][rows], self.inputs["weight"]
        logits = self.logits[rows] if "logits" in self.head.results else self.logits[: x.shape[0]]
        if "bias" in self.inputs:
            torch.addmm(self.inputs["bias"], x, weight, out=logits)
        else:
            torch.mm(x, weight, out=logits)
        likelihoods = torch.log_softmax(logits, 1)
        target = self.target[rows]
        self.loss -= likelihoods.gather(1, target).squeeze(1).where(self.valid[rows], 0.0).sum()
        if not self.gradients:
            return
        delta = likelihoods.exp_()
        delta.scatter_add_(1, target, delta.new_full((1, 1), -1.0).expand(target.shape)).mul_(self.factors[rows])
        if "of_input" in self.gradients:
            torch.mm(delta, self.inputs["right"], out=self.gradients["of_input"][rows])
        if "of_weight" in self.gradients:
            beta = 0 if rows.start == 0 else 1
            self.gradients["of_weight"].addmm_(delta.t(), self.inputs["left"][rows], beta=beta)
        if "of_bias" in self.gradients:
            self.gradients["of_bias"] += delta.sum(0)

    def finished(self) -> dict[str, Tensor]:
        loss = self.loss / self.total if self.head.reduction == _MEAN else self.loss
        found = {"logits": self.logits, "loss": loss, "total": self.total, **self.gradients}
        if "of_bias" in found:
            spec = self.head.workload.results[self.head.results.index("of_bias")]
            found["of_bias"] = found["of_bias"].view(spec.shape)
        return found
