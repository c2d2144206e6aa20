"""Inputs are random, reproducible, and laid out and bounded as the workload says."""

from __future__ import annotations

import pytest
import torch

from raftune.measure.inputs import InputError, copy_of, make_inputs, memory_of, shifted_copy_of
from raftune.workload import In, Operator, Out, TensorSpec, Workload


def workload(*specs: TensorSpec) -> Workload:
    return Workload((Operator("aten.relu.default", (In(0),)),), specs, (Out(0),), (specs[0],))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((3, 4), (0, 1)), ((3, 4), (7, 1)), ((2, 3), (0, 0)), ((0, 4), (4, 1)), ((), ())],
)
def test_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    (made,) = make_inputs(workload(TensorSpec("float32", shape, stride)), 0)
    assert (tuple(made.shape), made.stride(), made.dtype) == (shape, stride, torch.float32)
    assert made.numel() == 0 or made.count_nonzero() == made.numel()


def test_gaps_hold_values_and_expansions_share_them() -> None:
    gapped, expanded = make_inputs(workload(TensorSpec("float32", (3, 2), (5, 1)), TensorSpec("float32", (4, 2), (0, 1))), 1)
    assert memory_of(gapped).numel() == 12
    assert memory_of(gapped).count_nonzero() == 12
    assert memory_of(expanded).numel() == 2
    assert torch.equal(expanded[0], expanded[3])


def test_same_seed_same_values_and_inputs_differ() -> None:
    spec = TensorSpec("float32", (5,), (1,))
    first, again, other = (make_inputs(workload(spec, spec), seed) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_integers_fill_their_inclusive_range(dtype: str) -> None:
    (made,) = make_inputs(workload(TensorSpec(dtype, (1000,), (1,), low=0, high=9)), 0)
    assert made.dtype is getattr(torch, dtype)
    assert made.unique().tolist() == list(range(10))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_floats_keep_their_bounds(dtype: str) -> None:
    both = TensorSpec(dtype, (1000,), (1,), low=0.5, high=2.0)
    below, above = TensorSpec(dtype, (1000,), (1,), low=0.5), TensorSpec(dtype, (1000,), (1,), high=-1.0)
    within, positive, negative = make_inputs(workload(both, below, above), 0)
    assert within.dtype is getattr(torch, dtype)
    assert 0.5 <= within.min() < 0.6
    assert 1.9 < within.max() <= 2.0
    assert positive.min() >= 0.5
    assert negative.max() <= -1.0


def test_booleans_are_mixed_unless_bounded() -> None:
    free, true = make_inputs(workload(TensorSpec("bool", (100,), (1,)), TensorSpec("bool", (100,), (1,), low=1, high=1)), 0)
    assert 0 < free.count_nonzero() < 100
    assert true.all()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("int64", (3,), (1,)), "need both bounds"),
        (TensorSpec("int64", (3,), (1,), low=0), "need both bounds"),
        (TensorSpec("float32", (3,), (1,), low=2.0, high=1.0), "above"),
        (TensorSpec("uint8", (3,), (1,), low=300, high=400), "no uint8"),
        (TensorSpec("float32", (3,), (1, 1)), "do not describe"),
        (TensorSpec("float32", (3,), (-1,)), "do not describe"),
    ],
)
def test_impossible_specs_are_refused(spec: TensorSpec, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_inputs(workload(spec), 0)


def test_copies_keep_strides_and_share_nothing() -> None:
    original = torch.arange(12.0).as_strided((2, 3), (6, 2))
    copy, wide = copy_of(original), copy_of(original, torch.float64)
    assert torch.equal(copy, original)
    assert copy.stride() == wide.stride() == (6, 2)
    assert wide.dtype is torch.float64
    copy.zero_()
    assert original.sum() == torch.arange(12.0)[:11:2].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("shape", "stride"), [((2, 3), (6, 2)), ((4, 3), (0, 1)), ((), ()), ((0, 4), (4, 1))])
def test_shifted_copies_are_aligned_to_the_element_only(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    original = torch.arange(24.0).to(dtype).as_strided(shape, stride)
    shifted = shifted_copy_of(original)
    assert torch.equal(shifted, original)
    assert (shifted.dtype, shifted.stride()) == (dtype, stride)
    assert torch.equal(memory_of(shifted), memory_of(original))
    assert shifted.numel() == 0 or shifted.data_ptr() % 16 == dtype.itemsize % 16
