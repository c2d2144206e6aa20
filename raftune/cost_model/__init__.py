"""Predicts how candidates of different dialects compare on a workload, learned from the tuning log."""

from raftune.cost_model.dataset import Describer
from raftune.cost_model.errors import CostModelWarning, NotEnoughData
from raftune.cost_model.evaluation import Evaluation, evaluate, evaluate_rows
from raftune.cost_model.model import CostModel, Prediction, model_path
from raftune.cost_model.training import train

__all__ = [
    "CostModel",
    "CostModelWarning",
    "Describer",
    "Evaluation",
    "NotEnoughData",
    "Prediction",
    "evaluate",
    "evaluate_rows",
    "model_path",
    "train",
]
