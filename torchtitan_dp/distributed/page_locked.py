"""Page-locked host memory, for copies that do not block, without PyTorch's rounding.

PyTorch's allocator takes the next power of two of bytes: nothing is wasted on 4,096 values a token,
a third on 3,072 and six tenths on 5,120. Where it would waste, large buffers are pages of their
own here, registered with CUDA as PyTorch's checkpoints do it.
"""

import contextlib
import mmap
import weakref

import torch

EXACT_FROM = 1 << 20
"""Bytes from which a buffer takes its own pages alone."""


def page_locked(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate page-locked host memory, (numel,), for copies to and from `device`.

    It is unlocked and freed with its last view. For a CPU it is ordinary memory.

    Raises:
        RuntimeError: the driver cannot lock so much.
    """
    size = numel * dtype.itemsize
    if device.type != "cuda":
        return torch.empty(numel, dtype=dtype, device="cpu")
    if size < EXACT_FROM or size == _next_power(size):
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    pages = mmap.mmap(-1, page_locked_bytes(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # no process that is forked copies them
    buffer = torch.frombuffer(pages, dtype=dtype, count=numel)
    _lock(buffer.data_ptr(), len(pages))
    # Called before the storage lets go of its pages. At the process's end the driver unlocks.
    weakref.finalize(buffer.untyped_storage(), _unlock, buffer.data_ptr()).atexit = False
    return buffer


def page_locked_bytes(size: int) -> int:
    """Return how many bytes a buffer of `size` bytes takes: a power of two, or whole pages.

    >>> [page_locked_bytes(size) for size in (1, 300, 3 << 20, 1 << 22)]
    [1, 512, 3145728, 4194304]
    """
    if size < EXACT_FROM:
        return _next_power(size)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _lock(pointer: int, size: int) -> None:
    """Lock pages for CUDA. RuntimeError if it cannot: `out of memory`, say."""
    portable = 1  # of cudaHostRegister's flags: for all devices
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pointer, size, portable))


def _unlock(pointer: int) -> None:
    """Unlock pages after all copies, which know nothing of their end."""
    with contextlib.suppress(RuntimeError):  # a device that has failed: the process ends
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(pointer))
