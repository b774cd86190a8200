"""How long a sample is padded: `data.length_buckets`.

Guarantee:
    A sample's padded length is a public function of its own number of tokens, whatever else is
    drawn and on whatever mesh: nothing is rounded up to a neighbour's length. That number depends
    on the unit alone (with `data.unit_sampling = "random"`: on which of its records is taken, so
    on its own randomness too; of several windows, the longest counts). What it leaves out is
    padding behind the last token, which a causal model's earlier positions never see and whose
    labels are ignored, so the sample's gradient is that of the sample padded to T, up to
    rounding. Epsilon does not change. What does depend on the lengths of the records drawn is how
    long a step takes, how many microbatches it has and in which order they are summed (rounding):
    timing is labelled not private.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.data.contents import Progress

if TYPE_CHECKING:
    from torchtitan_dp.data.samples import SampleStore

_UNKNOWN = -1


class TokenCounts:
    """Counts the tokens of samples when they are first drawn, alike on all ranks.

    PRIVATE, like the records: in memory only, never logged, saved or put in a checkpoint.
    """

    def __init__(self, samples: "SampleStore", at_once: int) -> None:
        """
        Args:
            at_once: how many samples a rank counts, at most, while the others may wait for it.
        """
        self._samples, self._at_once = samples, at_once
        self._counts: np.ndarray | None = None  # 4 bytes a source, once somebody asks

    def share(self, sources: np.ndarray) -> np.ndarray:
        """List those of `sources` that this rank counts when `of` is asked for them next."""
        ranks, rank = _world()
        return self._unknown(sources)[rank::ranks]

    def of(
        self,
        sources: np.ndarray,
        device: torch.device,
        count: Callable[[int], int] | None = None,
    ) -> np.ndarray:
        """Count the tokens of `sources`, int64 and alike on every rank: what samples are made of.

        Every rank counts its share of those not known yet, and all take the sum: if one could not
        read a record that others can, they still agree on how to deal out the draw, so that no
        record is processed twice. In rounds, so that nobody waits for more than `at_once` samples
        of another, each of which takes a bounded time (`excerpts.most_bytes`).

        Collective: for every `at_once` samples a rank that are not known yet, an all-reduce of 4
        bytes each over the world, if there is a process group. A line on stderr, of rank 0, tells
        how far it is, every 5 seconds after the first 5.

        Args:
            device: what the process group sends from.
            count: what counts the tokens of a source; `SampleStore.tokens`, if None.
        """
        count = count or self._samples.tokens
        unknown, counts = self._unknown(sources), self._known()
        if len(unknown):
            ranks, rank = _world()
            progress = Progress("tokenizing what was drawn", len(unknown), "samples")
            for start in range(0, len(unknown), ranks * self._at_once):
                asked = unknown[start : start + ranks * self._at_once]
                found = np.zeros(len(asked), dtype=np.int32)
                for place in range(rank, len(asked), ranks):
                    found[place] = count(int(asked[place]))
                if ranks > 1:
                    summed = torch.from_numpy(found).to(device)
                    dist.all_reduce(summed)
                    found = summed.cpu().numpy()
                counts[asked] = found
                if rank == 0:
                    progress.add(len(asked))
            progress.end()
        return counts[sources].astype(np.int64)

    def _known(self) -> np.ndarray:
        if self._counts is None:
            self._counts = np.full(self._samples.sources, _UNKNOWN, dtype=np.int32)
        return self._counts

    def _unknown(self, sources: np.ndarray) -> np.ndarray:
        return sources[self._known()[sources] == _UNKNOWN]


def _world() -> tuple[int, int]:
    """Return how many ranks there are, and which one this is."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def padded_lengths(counts: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Find the shortest length that holds each number of tokens, at most the last of `lengths`.

    >>> padded_lengths(np.array([0, 4, 5, 100]), (4, 8, 100))
    array([  4,   4,   8, 100])
    """
    return np.array(lengths)[np.searchsorted(lengths, counts)]
