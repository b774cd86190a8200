"""`data.verify_records = "drawn"`: machines compare the samples that they make of each draw.

For data too large to be hashed whole. Every unit that is drawn becomes a sample on one rank of the
context-parallel group that it is dealt to (`feed`), and once more on each other machine, from that
machine's own files, only to be compared. The cost is public: each machine makes the samples of the
whole draw instead of its share.

Guarantee:
    If a step is not refused, every unit drawn in it has one sample (token ids, labels, padding and
    window): the ranks that it was dealt to computed on what one of them made, and a rank of every
    other machine made the same from the files there. So no sample is one person's on one rank and
    another's on the next, and nobody enters under two indices because machines hold records in two
    orders. Assumed: the ranks of one machine read the same files, these do not change between two
    draws, and what one rank sends over cp is what the others receive. Nothing is said about units
    that were never drawn.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.process import Fault

_MASK = 2**62 - 1


class Place(NamedTuple):
    """Tells where a rank is among those that read the same files."""

    machine: range
    """The ranks that lie on its machine."""

    local_rank: int

    @classmethod
    def of(cls, rank: int, local_rank: int, local_ranks: int) -> "Place":
        """Work the place out as torchrun numbers ranks: those of a machine in a row.

        Args:
            rank: in the world.
            local_rank, local_ranks: the rank's number on its machine, and how many are there.

        >>> Place.of(rank=5, local_rank=1, local_ranks=4)
        Place(machine=range(4, 8), local_rank=1)
        """
        first = rank - local_rank
        return cls(range(first, first + local_ranks), local_rank)


class Comparison:
    """Collects what this rank made of the units of one draw."""

    def __init__(self, draw: np.ndarray, device: torch.device) -> None:
        """
        Args:
            draw: positions, int64 (n,), the same on every rank.
            device: what the process group sends from.
        """
        self._device = device
        self._slots = {int(position): slot for slot, position in enumerate(draw)}
        self._words = np.zeros((len(draw), 2), dtype=np.int64)  # 0: this rank did not make it

    def add(self, position: int, words: np.ndarray) -> None:
        """Take in what `digest` says of the sample made here of the unit at a position."""
        self._words[self._slots[position]] = words

    def require_alike(self) -> None:
        """Refuse the draw if two ranks made different samples of one unit.

        Collective (of `know_alike`), whatever was drawn.

        Raises:
            Fault: on all ranks. It does not say which unit.
        """
        if not know_alike(self._words, self._device):
            raise Fault(
                "data.verify_records = 'drawn': ranks made different samples of one drawn unit, "
                "and the step was not taken: training.dataset_path and model.hf_assets_path must "
                "be identical on every node and stay unchanged; fix the copies, and start again"
            )


def digest(tokens_T: np.ndarray, labels_T: np.ndarray) -> np.ndarray:
    """Hash a sample, int32, padding included: int64 (2,), each 1 to 2^62. Any thread may ask."""
    hashed = hashlib.blake2b(digest_size=16)
    for array_T in (tokens_T, labels_T):
        hashed.update(array_T.tobytes())
    return (np.frombuffer(hashed.digest(), dtype="<i8") & _MASK) + 1


def know_alike(known: np.ndarray, device: torch.device) -> bool:
    """Tell, alike on every rank, whether no two ranks know different values of one thing.

    Collective: an all-reduce over the world of 16 bytes for each value and 16 more, even if there
    are none.

    Args:
        known: int64 of one shape on all ranks; 0 where this rank knows nothing, else 1 to 2^62.
        device: what the default process group's backend sends from.
    """
    assert known.dtype == np.int64
    assert known.min(initial=0) >= 0
    least = np.int64(-(2**62) - 1)  # below minus every value: who knows nothing decides nothing
    highest = np.append(known.ravel(), 1)
    lowest = np.append(np.where(known.ravel() == 0, least, -known.ravel()), -1)
    both = torch.from_numpy(np.stack([highest, lowest])).to(device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    highest, lowest = both.cpu().numpy()
    is_unknown = highest == 0
    return bool(((highest == -lowest) | is_unknown).all())
