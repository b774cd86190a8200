"""Blocks of values that fit a core's cache, dealt out to threads: how the CPU is kept busy."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Positions in a block. No more than torch's parallel grain size: an operation stays on its thread.
BLOCK = 2**15
_A_THREADS_LEAST = 4  # blocks; starting a thread takes as long as some of them


def on_threads(work: Callable[[range], None], blocks: range) -> None:
    """Deal `blocks` out to as many threads as torch uses, and to fewer where there are few."""
    threads = min(torch.get_num_threads(), len(blocks) // _A_THREADS_LEAST)
    if threads <= 1:
        work(blocks)
        return
    with ThreadPoolExecutor(threads) as pool:  # numpy and torch release the GIL
        list(pool.map(torch.no_grad()(work), (blocks[i::threads] for i in range(threads))))
