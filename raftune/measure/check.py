"""Accuracy check: is a kernel's every result, and every in-place side effect, what the workload asks for?

The reference is the region in float64. What a candidate may differ by is scaled by what PyTorch's own kernel differs by, so a
long sum in float32 is allowed its rounding and a kernel that silently computes in less precision is not. Apart from values:
shapes, dtypes and strides are those of PyTorch's results, results are fresh memory that a second call leaves alone, inputs
stay as they were, and a second call with other values in the same input tensors gives the results of those values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raftune.dialects.base import Kernel
from raftune.dialects.torch_ops import graph_module
from raftune.measure import poison
from raftune.measure.inputs import copy_of, make_inputs, memory_of, shifted_copy_of
from raftune.measurement import Status
from raftune.workload import Arg, Literal, Workload

# Relative tolerance where the default kernel is as exact as its result's dtype allows: a few roundings of a short dtype, some
# tens of a long one.
_BASE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2.5e-3, "bfloat16": 2e-2}
_OTHER_TOLERANCE = 0.1
# A candidate may have this many times the default's own error beyond rounding (another order of summation, Winograd) ...
_ERROR_FACTOR = 16.0
# ... up to this relative error, or twice the default's where the default itself is that far off.
_MAX_TOLERANCE = 0.1
# Without a reference in float64 the default's error is unknown, and part of what a candidate differs by.
_NARROW_SLACK = 4.0
# The default's error in a few numbers may be small by luck: there, what the exact result changes by when the inputs change by
# some roundings counts as its error too (a sum that cancels is that ill-conditioned for every order of summation).
_FEW = 256
_SHAKE_ROUNDINGS = 8.0
# Larger magnitudes are masks (the dtype's minimum as "minus infinity"), not values to scale a tolerance by.
_MASK_MAGNITUDE = 1e30
_TINY = 1e-300
_WIDENED = ("float32", "float16", "bfloat16")
_WIDENED_LITERALS = tuple(Literal("dtype", name) for name in _WIDENED)


class ReferenceFailed(RuntimeError):
    """PyTorch's own operators cannot run the workload, so no candidate of it can be judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``max_error`` in units of the tolerance (``None``: not comparable); ``message``: what is wrong, or how it was judged."""

    status: Status
    max_error: float | None
    message: str


@dataclass(frozen=True, slots=True)
class _Expected:
    """One result: the reference's values, the default's, and the relative tolerance derived from both."""

    name: str
    reference: Tensor
    default: Tensor
    scale: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class _Case:
    """One set of input values with everything that must come out of it."""

    inputs: list[Tensor]
    sharing: frozenset[tuple[int, str]]
    expected: list[_Expected]


class _Wrong(Exception):
    """A rule that the kernel broke."""


class Checker:
    """Checks kernels of one workload; the references are computed once, when it is made, and kept.

    Raises :class:`ReferenceFailed` if PyTorch's own operators fail on the workload.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self._workload = workload
        self._default = graph_module(workload)
        self._note = ""
        first, second = make_inputs(workload, seed), make_inputs(workload, seed + 1)
        for i, spec in enumerate(workload.inputs):
            if spec.constant:  # a kernel may keep what it derived from it
                second[i] = first[i]
        self._cases = [self._case(inputs) for inputs in (first, second)]

    def scratch(self) -> list[Tensor]:
        """Inputs for a kernel to be timed with: a copy, since a kernel may write to them."""
        return [copy_of(tensor) for tensor in self._cases[0].inputs]

    def check(self, kernel: Kernel) -> Verdict:
        """Call ``kernel`` three times and judge it. What the kernel raises is passed on."""
        first, second = self._cases
        inputs = [copy_of(tensor) for tensor in first.inputs]
        try:
            kept = self._call(kernel, inputs, first, poison.FRESH)
            snapshot = [copy_of(tensor) for tensor in kept]
            for spec, tensor, values in zip(self._workload.inputs, inputs, second.inputs, strict=True):
                if not spec.constant:
                    memory_of(tensor).copy_(memory_of(values))
            fresh = self._call(kernel, inputs, second, poison.RECYCLED)
            # A kernel that takes an aligned load for granted ends the process here.
            shifted = self._call(kernel, [shifted_copy_of(tensor) for tensor in second.inputs], second, poison.FRESH)
        except _Wrong as wrong:
            return Verdict(Status.WRONG, None, str(wrong))
        for expected, before, after in zip(first.expected, snapshot, kept, strict=True):
            if not _same_bits(before, after):
                return Verdict(Status.WRONG, None, f"{expected.name} of one call was overwritten by the next call")
        error, where = max(
            (
                _error(expected, result)
                for case, results in ((first, snapshot), (second, fresh), (second, shifted))
                for expected, result in zip(case.expected, results, strict=True)
            ),
            default=(0.0, ""),
        )
        if error <= 1.0:
            return Verdict(Status.OK, error, self._note)
        return Verdict(Status.WRONG, error if math.isfinite(error) else None, where)

    def _call(self, kernel: Kernel, inputs: list[Tensor], case: _Case, pattern: int) -> list[Tensor]:
        """One call on poisoned memory: its outputs and copies of the inputs that it may write to; raises :class:`_Wrong`."""
        with poison.poisoned_memory(pattern):
            returned = kernel(*inputs)
        outputs = _outputs_of(returned, len(self._workload.outputs))
        for expected, output in zip(case.expected, outputs, strict=False):
            _compare_layout(expected, output)
        if not_fresh := _sharing(outputs, inputs) - case.sharing:
            raise _Wrong(f"output {min(not_fresh)[0]} is not fresh memory: it shares that of {min(not_fresh)[1]}")
        for i, (tensor, original) in enumerate(zip(inputs, case.inputs, strict=True)):
            if i not in self._workload.mutates and not _same_bits(tensor, original):
                raise _Wrong(f"input {i} was written to")
        return [*outputs, *(copy_of(inputs[i]) for i in self._workload.mutates)]

    def _case(self, values: list[Tensor]) -> _Case:
        inputs = [copy_of(tensor) for tensor in values]
        count, mutates = len(self._workload.outputs), self._workload.mutates
        try:
            outputs = _outputs_of(self._default(*inputs), count)
        except Exception as error:  # whatever an operator raises: the caller gets it as one typed failure
            raise ReferenceFailed(f"PyTorch's own {self._workload.op} fails: {_first_line(error)}") from error
        sharing = _sharing(outputs, inputs)
        defaults = [*outputs, *(inputs[i] for i in mutates)]
        wide = self._reference(values)
        references, slack = (defaults, _NARROW_SLACK) if wide is None else (wide, 1.0)
        shaken = None
        if wide is not None and any(0 < t.numel() <= _FEW and t.is_floating_point() for t in defaults):
            shaken = self._reference(values, shake=True)
        names = [*(f"output {i}" for i in range(count)), *(f"updated input {i}" for i in mutates)]
        expected = [_expect(*of, slack) for of in zip(names, references, defaults, shaken or references, strict=True)]
        return _Case(values, sharing, expected)

    def _reference(self, values: list[Tensor], *, shake: bool = False) -> list[Tensor] | None:
        """The results in float64, or ``None``, noted for the verdict, if an operator does not take float64.

        ``shake`` changes every input value at random by some roundings of float32 (of float64 if that is its dtype).
        """
        wide = [copy_of(t, torch.float64 if str(t.dtype).removeprefix("torch.") in _WIDENED else None) for t in values]
        generator = torch.Generator().manual_seed(0)
        for tensor, original in zip(wide, values, strict=True):
            if shake and tensor.is_floating_point():
                rounding = torch.finfo(torch.promote_types(original.dtype, torch.float32)).eps
                memory = memory_of(tensor)
                noise = torch.rand(memory.shape, dtype=memory.dtype, generator=generator).mul_(2).sub_(1)
                memory.mul_(noise.mul_(_SHAKE_ROUNDINGS * rounding).add_(1))
        try:
            outputs = _outputs_of(graph_module(_widened(self._workload))(*wide), len(self._workload.outputs))
        except (RuntimeError, TypeError, ValueError) as error:
            self._note = f"compared with PyTorch's own result, since there is none in float64: {_first_line(error)}"
            return None
        return [*outputs, *(wide[i] for i in self._workload.mutates)]


def _widened(workload: Workload) -> Workload:
    """The workload with every dtype argument that is narrower than float64 replaced by it."""

    def widen(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(widen(a) for a in arg)
        return Literal("dtype", "float64") if arg in _WIDENED_LITERALS else arg

    operators = [
        replace(o, args=tuple(widen(a) for a in o.args), kwargs=tuple((k, widen(a)) for k, a in o.kwargs))
        for o in workload.operators
    ]
    return replace(workload, operators=tuple(operators))


def _outputs_of(returned: Any, count: int) -> list[Tensor]:
    outputs = [returned] if count == 1 else list(returned) if isinstance(returned, tuple | list) else [returned]
    if count == 0 and returned is None:
        outputs = []
    if len(outputs) != count or not all(isinstance(output, Tensor) for output in outputs):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise _Wrong(f"{count} tensors must be returned, got ({kinds})")
    return outputs


def _compare_layout(expected: _Expected, output: Tensor) -> None:
    default = expected.default
    if output.dtype != default.dtype or output.shape != default.shape:
        raise _Wrong(f"{expected.name} is {output.dtype} {list(output.shape)}, should be {default.dtype} {list(default.shape)}")
    strides = [(a, b) for n, a, b in zip(output.shape, output.stride(), default.stride(), strict=True) if n > 1]
    if output.numel() and any(a != b for a, b in strides):
        raise _Wrong(f"{expected.name} has strides {list(output.stride())}, should be {list(default.stride())}")


def _sharing(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> frozenset[tuple[int, str]]:
    """Which outputs share storage with what: an output is told by its number, the other side by words."""
    named = [(f"input {i}", t) for i, t in enumerate(inputs)] + [(f"output {i}", t) for i, t in enumerate(outputs)]
    return frozenset(
        (i, name)
        for i, output in enumerate(outputs)
        for name, other in named
        if other is not output or name != f"output {i}"
        if output.numel() and output.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _expect(name: str, reference: Tensor, default: Tensor, shaken: Tensor, slack: float) -> _Expected:
    if not (default.is_floating_point() or default.is_complex()):
        off = float((reference != default).double().mean()) if default.numel() else 0.0
        return _Expected(name, reference, default, 0.0, _tolerance(0.0, off))
    base = _BASE_TOLERANCE.get(str(default.dtype).removeprefix("torch."), _OTHER_TOLERANCE)
    reference = reference.double()
    judged = reference.isfinite() & default.isfinite()
    values = _where(reference, judged)
    ordinary = _where(values, values.abs() < _MASK_MAGNITUDE)
    scale = float(ordinary.square().mean().sqrt()) if ordinary.numel() else 0.0
    unit = values.abs().add_(scale).clamp_(min=_TINY)

    def largest(other: Tensor) -> float:
        errors = _where(other, judged).double().sub(values).abs_().div_(unit).nan_to_num_(nan=0.0, posinf=0.0)
        return float(errors.max()) if errors.numel() else 0.0

    beyond_rounding = max(0.0, largest(default) - torch.finfo(default.dtype).eps / 2, largest(shaken))
    return _Expected(name, reference, default, scale, _tolerance(slack * base, beyond_rounding))


def _where(values: Tensor, mask: Tensor) -> Tensor:
    """``values[mask]``, without the cost of that where the mask leaves nothing out."""
    return values if bool(mask.all()) else values[mask]


def _tolerance(base: float, default_error: float) -> float:
    return max(base, min(_ERROR_FACTOR * default_error, _MAX_TOLERANCE), 2.0 * default_error)


def _error(expected: _Expected, result: Tensor) -> tuple[float, str]:
    """The largest error in units of the tolerance, and where it is; infinite where a value is not even comparable."""
    if result.numel() == 0:
        return 0.0, ""
    reference, default = expected.reference, expected.default
    if not (result.is_floating_point() or result.is_complex()):
        # A boolean is compared as the byte that it is: other bytes than 0 and 1 break their readers.
        bits = (result.view(torch.uint8), reference.view(torch.uint8)) if result.dtype is torch.bool else (result, reference)
        off = bits[0] != bits[1]
        share = float(off.double().mean())
        error = 0.0 if share == 0.0 else share / expected.tolerance if expected.tolerance else math.inf
        return error, f"{expected.name}: {int(off.sum())} of {off.numel()} values differ"
    values = result.double()
    allowed = reference.abs().add_(expected.scale).clamp_(min=_TINY).mul_(expected.tolerance)
    errors = (values - reference).abs_().div_(allowed)
    if (largest := float(errors.max())) <= 1.0:  # not so if anything is not a number
        return largest, ""
    errors.nan_to_num_(nan=math.inf, posinf=math.inf)
    # Where the exact result is not finite the kernel must say the same as it, or as PyTorch; where only PyTorch overflows,
    # anything goes.
    same = torch.zeros_like(errors, dtype=torch.bool)
    for other in (reference, default.double()):
        same |= (values == other) | (values.isnan() & other.isnan())
    odd = torch.where(same | reference.isfinite(), 0.0, math.inf)
    errors = torch.where(reference.isfinite() & default.isfinite(), errors, odd)
    worst = int(errors.argmax())
    position = [int(i) for i in torch.unravel_index(torch.tensor(worst), errors.shape)]
    got, wanted = float(values[tuple(position)]), float(reference[tuple(position)])
    error = float(errors.flatten()[worst])
    return error, f"{expected.name}{position} is {got:.6g}, should be {wanted:.6g} ({error:.3g} times the tolerance)"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(memory_of(a).view(torch.uint8), memory_of(b).view(torch.uint8))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
