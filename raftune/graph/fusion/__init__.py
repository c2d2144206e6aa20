"""Regions of several operators that may be lowered as one unit: proposals, whose worth is measured."""

from raftune.graph.fusion.order import Ancestry, contract
from raftune.graph.fusion.rules import propose, proposed_tasks
from raftune.graph.fusion.whole import whole_regions

__all__ = ["Ancestry", "contract", "propose", "proposed_tasks", "whole_regions"]
