"""What malloc keeps of freed memory: enough to be fast, and the same however many threads there are.

A setting of the process, made once by whoever runs a daemon, before it starts threads. Only glibc has it.
"""

import ctypes

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

#: Free memory at the end of the heap that is kept: a few of the largest chunks.
KEEP_BYTES = 16 << 20
#: Blocks up to this size are not given back to the kernel one by one; the largest that glibc allows. Memory fresh from
#: the kernel is cleared and mapped page by page: with 1 MiB the Python engine read half as many compressed files (2,500
#: instead of 4,400 in 12 s, 8 readers).
_LARGE_BYTES = 32 << 20


def bound_freed_memory() -> None:
    """Let all threads allocate from one heap, which reuses what any of them has freed.

    With an arena for each thread, as is usual, each keeps what it has freed for itself, some 60 MiB each here, and a
    daemon of 32 MiB of cache had 1.1 GB after 20 s. Chunks of the native engine come from pools of their own
    (native/base/pool.h); what is left to malloc is small, or Python's, whose threads take turns anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)


def return_freed_memory() -> None:
    """Give what malloc keeps back to the kernel, now; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
