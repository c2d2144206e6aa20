"""What a candidate raised, as one of the typed outcomes."""

from __future__ import annotations

from raftune.dialects.base import BuildError, Unsupported
from raftune.dialects.registry import UnknownDialect
from raftune.measure.check import ReferenceFailed
from raftune.measure.inputs import InputError
from raftune.measurement import Status

_MESSAGE_LIMIT = 1000
# How PyTorch's allocator, the C++ library and CUDA say that memory ran out.
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")


def status_of(error: BaseException, *, building: bool) -> Status:
    """The outcome that ``error`` means, raised while ``building`` a kernel or while running it."""
    match error:
        case Unsupported() | UnknownDialect():
            return Status.UNSUPPORTED
        case BuildError():
            return Status.BUILD_ERROR
        case ReferenceFailed() | InputError():  # not the candidate's doing, but nobody can say that it is right
            return Status.UNSUPPORTED
        case _ if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
            return Status.OOM
        case _:
            return Status.BUILD_ERROR if building else Status.CRASH


def describe(error: BaseException) -> str:
    """Type and text of ``error``, cut to what fits into a log row."""
    text = str(error).strip()
    if isinstance(error, BuildError):  # our own wording needs no type in front
        return text[:_MESSAGE_LIMIT]
    return f"{type(error).__name__}: {text}"[:_MESSAGE_LIMIT]
