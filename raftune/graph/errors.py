"""What can be wrong with a capture or with a call of a captured step."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """The model, its loss or its inputs cannot be made into one static training graph."""


class UnsupportedOptimizer(CaptureError):
    """The optimizer, or one of its settings, has no update in the training graph; the message names it."""


class StepMismatch(RuntimeError):
    """A call differs from what was captured (shape, dtype, structure, a frozen or retyped parameter, a changed setting).

    Nothing has been changed when this is raised: the caller may run the eager step instead, or capture again.
    """


class BatchMismatch(StepMismatch):
    """Only the batch differs from what was captured: its structure, a shape, a dtype or a constant."""
