"""Training from a log, for the command line and for the tuner."""

from __future__ import annotations

from raftune.cost_model.model import CostModel
from raftune.device import Device
from raftune.log import TuningLog


def train(log: TuningLog, *, device: Device | None = None, seed: int = 0) -> CostModel:
    """Fit a model on everything in the log (all devices; ``device`` is the one to predict for) and store it beside the log.

    A log opened read-only is not written beside. Raises :class:`NotEnoughData`, and ``OSError`` if the model cannot be stored.
    """
    model = CostModel(seed=seed, device=device).fit(log.training_rows())
    if not log.read_only:
        model.save_beside(log.path)
    return model
