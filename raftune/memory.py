"""Keeping the pages of freed memory, so that the next step need not have them zeroed again."""

from __future__ import annotations

import ctypes
import functools
import platform

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = 2**31 - 1
_TOP_PAD = 64 << 20


@functools.cache
def keep_pages() -> bool:
    """Tell glibc to keep what is freed within the process; whether it could be told (it is glibc).

    A step allocates and frees the same activations again and again. By default glibc returns large blocks to the system at
    once, and every step pays for page faults: a tenth of a small model's step and more. The process then keeps its peak
    memory until it ends. This holds for the whole process and cannot be undone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    told = [mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _NEVER), mallopt(_M_TOP_PAD, _TOP_PAD)]
    return all(told)
