"""Traces as data from strangers: what is let through to TVM. Needs no TVM."""

from __future__ import annotations

from typing import Any

from raftune.dialects.base import BuildError

# The primitives that the CPU design space uses; TVM has others that call back into registered functions.
_PRIMITIVES = frozenset(
    {
        "AddUnitLoop",
        "Annotate",
        "CacheRead",
        "CacheWrite",
        "ComputeAt",
        "ComputeInline",
        "DecomposeReduction",
        "Fuse",
        "GetChildBlocks",
        "GetConsumers",
        "GetLoops",
        "GetProducers",
        "GetSBlock",
        "Parallel",
        "RFactor",
        "Reorder",
        "ReverseComputeAt",
        "ReverseComputeInline",
        "SampleCategorical",
        "SampleComputeLocation",
        "SamplePerfectTile",
        "Split",
        "Unannotate",
        "Unroll",
        "Vectorize",
    }
)
_ANNOTATIONS = frozenset(
    {
        "meta_schedule.tiling_structure",
        "meta_schedule.parallel",
        "meta_schedule.vectorize",
        "meta_schedule.unroll_explicit",
        "meta_schedule.unroll_implicit",
        "meta_schedule.random_compute_producer",
    }
)
_MAX_INSTRUCTIONS = 2000
_MAX_UNROLL = 1024
_MAX_DEPTH = 6


def check_trace(trace: Any) -> None:
    """Raise :class:`BuildError`, naming the value, unless ``trace`` is a list of known primitives with their decisions."""
    if not (isinstance(trace, list | tuple) and len(trace) == 2 and all(isinstance(part, list | tuple) for part in trace)):
        raise BuildError("a trace is a list of two lists, instructions and decisions")
    instructions, decisions = trace
    if len(instructions) > _MAX_INSTRUCTIONS:
        raise BuildError(f"trace of {len(instructions)} instructions; at most {_MAX_INSTRUCTIONS} are taken")
    for number, instruction in enumerate(instructions):
        _check_instruction(number, instruction)
    for decision in decisions:
        if not (isinstance(decision, list | tuple) and len(decision) == 2 and _is_index(decision[0], len(instructions))):
            raise BuildError(f"decision {decision!r} does not belong to an instruction")
        values = decision[1] if isinstance(decision[1], list | tuple) else [decision[1]]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise BuildError(f"decision {decision!r} is not made of integers")


def _check_instruction(number: int, instruction: Any) -> None:
    if not (isinstance(instruction, list | tuple) and len(instruction) == 4 and isinstance(instruction[0], str)):
        raise BuildError(f"instruction {number} is not a list of a name, inputs, attributes and outputs")
    name, inputs, attributes, outputs = instruction
    if name not in _PRIMITIVES:
        raise BuildError(f"instruction {number}: unknown primitive {name!r}")
    if not all(isinstance(part, list | tuple) and _is_plain(part, _MAX_DEPTH) for part in (inputs, attributes, outputs)):
        raise BuildError(f"instruction {number} ({name}): inputs, attributes and outputs are lists of names and numbers")
    if name in ("Annotate", "Unannotate") and (not attributes or attributes[0] not in _ANNOTATIONS):
        raise BuildError(f"instruction {number}: annotation {attributes!r} is not one of {sorted(_ANNOTATIONS)}")
    if name == "Annotate" and not all(isinstance(v, str) or _is_index(v, _MAX_UNROLL + 1) for v in inputs):
        raise BuildError(f"instruction {number}: annotation of {inputs!r}; numbers are from 0 to {_MAX_UNROLL}")
    if name == "SampleCategorical" and not _are_unroll_steps(attributes):
        raise BuildError(f"instruction {number}: unrolling {attributes!r}; steps are from 0 to {_MAX_UNROLL}")


def _are_unroll_steps(attributes: Any) -> bool:
    return (
        bool(attributes)
        and isinstance(attributes[0], list | tuple)
        and all(_is_index(v, _MAX_UNROLL + 1) for v in attributes[0])
    )


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(v, depth - 1) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_index(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
