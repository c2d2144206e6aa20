"""Regions of several operators that may be lowered as one unit: proposals, whose worth is measured."""

from raftune.graph.fusion.order import Ancestry, contract
from raftune.graph.fusion.propose import propose
from raftune.graph.fusion.whole import whole_regions

__all__ = ["Ancestry", "contract", "propose", "whole_regions"]
