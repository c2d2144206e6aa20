"""The ``tvm`` dialect. Importing it does not import TVM: that takes seconds and happens where something is built."""

from raftune.dialects.tvm.dialect import TvmDialect

__all__ = ["TvmDialect"]
