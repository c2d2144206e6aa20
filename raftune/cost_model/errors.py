"""What can go wrong with the cost model."""

from __future__ import annotations


class NotEnoughData(ValueError):
    """The log holds too little to train or to evaluate on; the message says what is missing."""


class CostModelWarning(UserWarning):
    """A stored model was not used, or a dialect could not describe a config; choices fall back to less knowledge."""
