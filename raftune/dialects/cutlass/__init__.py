"""The ``cutlass`` dialect."""

from raftune.dialects.cutlass.dialect import CutlassDialect

__all__ = ["CutlassDialect"]
