"""From a draw of units to the microbatches of one data-parallel rank."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan_dp.data.buckets import TokenCounts, padded_lengths
from torchtitan_dp.data.comparison import Comparison, Place
from torchtitan_dp.data.samples import SampleStore
from torchtitan_dp.privacy.sampling import choices, deal

EVER_SAME = bytes(32)  # as a key: the same records and windows each time, to compare losses
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Microbatch(NamedTuple):
    """Holds B samples; padding has `valid_B` False and labels that are all ignored."""

    tokens_BT: torch.Tensor  # int64
    labels_BT: torch.Tensor  # int64, shifted
    valid_B: torch.Tensor  # bool

    def to(self, device: torch.device) -> "Microbatch":
        return Microbatch(*(tensor.to(device) for tensor in self))

    def split(self, batch_size: int | None) -> Iterator["Microbatch"]:
        """Yield parts of at most `batch_size` samples, or all at once if it is None."""
        size = batch_size or len(self.valid_B)
        for parts in zip(*(tensor.split(size) for tensor in self), strict=True):
            yield Microbatch(*parts)


class RecordLoader:
    """Loads samples of the training units, for one data-parallel rank.

    Stateless: which units a step uses is drawn afresh from secrets, so a checkpoint holds nothing
    of it.
    """

    def __init__(
        self,
        samples: SampleStore,
        units: np.ndarray,
        *,
        ranks: int,
        rank: int,
        batch_size: int,
        fingerprint: str = "",
        shuffle_seed: int = 0,
        compared: tuple[Place, torch.device] | None = None,
    ) -> None:
        """
        Args:
            units: those of `samples` that may be trained on; positions in this array are what
                is drawn.
            ranks, rank: data-parallel degree and this rank's place in it; the ranks of one
                context-parallel group have the same.
            batch_size: B, samples in a microbatch.
            fingerprint: of the data and how it was split; private.
            shuffle_seed: of the baseline without privacy.
            compared: this rank's place, and what the process group sends from: ranks hold the
                samples of each draw against each other.
        """
        self.samples, self.units, self.fingerprint = samples, units, fingerprint
        self._ranks, self._rank, self._batch_size = ranks, rank, batch_size
        self._shuffle_seed, self._compared = shuffle_seed, compared
        self._counts = TokenCounts(samples, batch_size)

    def padding(self, length: int) -> Microbatch:
        """Make a microbatch of padding alone, as a draw that leaves this rank nothing has it,
        reading no record.
        """
        slots = np.full(self._batch_size, -1)
        tokens_BT, labels_BT = self.samples.batch(slots, length)
        return Microbatch(tokens_BT, labels_BT, torch.from_numpy(slots >= 0))

    @property
    def at_once(self) -> int:
        """Bound the samples that this rank makes while the others may wait for it: those of one
        microbatch, and where ranks compare, what it makes again meanwhile.
        """
        samples = self._batch_size
        if self._compared is not None:
            samples += -(-self._ranks * self._batch_size // self._compared[0].local_ranks)
        return samples

    def lengths(
        self,
        draw: np.ndarray,
        ladder: tuple[int, ...],
        device: torch.device,
        key: bytes = EVER_SAME,
    ) -> np.ndarray:
        """Find what each drawn unit is padded to: a function of its own number of tokens.

        Args:
            key: as of `microbatches`, and the same.

        Collective (of `buckets.TokenCounts`), unless `ladder` has one length.
        """
        if len(ladder) == 1:
            return np.full(len(draw), ladder[0])
        sources = [self.samples.source(int(self.units[p]), self._rng(key, p)) for p in draw]
        return padded_lengths(self._counts.of(np.array(sources, dtype=np.int64), device), ladder)

    def _rng(self, key: bytes, position: int) -> np.random.Generator | None:
        is_needed = self.samples.is_random and position >= 0
        return choices(key, int(position)) if is_needed else None

    def microbatches(
        self, draw: np.ndarray, lengths: np.ndarray | None = None, key: bytes = EVER_SAME
    ) -> Iterator[Microbatch]:
        """Yield this rank's share of a draw.

        Args:
            draw: global positions in `units`, the same on every rank.
            lengths: what each is padded to, the same on every rank; `seq_len` if None.
            key: of this step, the same on every rank, for the choice of records and windows.

        Every rank yields the same number of microbatches of the same lengths in the same order,
        whatever was drawn; the rest is padding. Each length is dealt out by itself, the longest
        first, so that ranks in lockstep compute equally much and no sample is padded for another's
        sake. It costs at most one microbatch a length more, whose lengths together are below 2T.

        Collective, where ranks compare (`data.comparison`): asking for the microbatch after the
        last one raises `Fault` on all ranks if two of them made different samples of one unit.
        """
        if lengths is None:
            lengths = np.full(len(draw), self.samples.seq_len)
        dealt = [
            (int(length), slots)
            for length in np.unique(lengths)[::-1]
            for slots in self._deal(draw[lengths == length], self._rank)
        ]
        comparison = None if self._compared is None else Comparison(draw, self._compared[1])
        others = [] if comparison is None else self._others(draw, lengths)
        for number, (length, slots) in enumerate(dealt):
            valid = slots >= 0
            indices = np.where(valid, self.units[slots], -1)
            rngs = [self._rng(key, slot) for slot in slots]
            tokens_BT, labels_BT = self.samples.batch(indices, length, rngs)
            if comparison is not None:
                for row in np.flatnonzero(valid).tolist():
                    comparison.add(int(slots[row]), tokens_BT[row], labels_BT[row])
                # As many in each microbatch: nobody waits for many of them at once.
                for position, its_length in others[number :: len(dealt)]:
                    unit, rng = int(self.units[position]), self._rng(key, position)
                    comparison.add(position, *self.samples.sample_again(unit, its_length, rng))
            yield Microbatch(tokens_BT, labels_BT, torch.from_numpy(valid))
        if comparison is not None:
            comparison.require_alike()

    def _deal(self, share: np.ndarray, rank: int) -> list[np.ndarray]:
        return deal(share, ranks=self._ranks, rank=rank, batch_size=self._batch_size)

    def _others(self, draw: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int]]:
        """Share out, by positions and lengths, what is dealt to no rank of this machine."""
        assert self._compared is not None
        place, _ = self._compared
        dealt_here = {
            position
            for length in np.unique(lengths)
            for rank in place.machine
            for slots in self._deal(draw[lengths == length], rank)
            for position in slots.tolist()
        }
        missing = [
            (position, length)
            for position, length in zip(draw.tolist(), lengths.tolist(), strict=True)
            if position not in dealt_here
        ]
        return missing[place.local_rank :: place.local_ranks]

    def __iter__(self) -> Iterator[Batch]:
        """Yield shuffled fixed-size batches without end, for the baseline WITHOUT privacy only.

        Samples are `seq_len` long, whatever `data.length_buckets` says.
        """
        rng = np.random.default_rng(self._shuffle_seed)
        stride = self._ranks * self._batch_size
        mine = slice(self._rank * self._batch_size, (self._rank + 1) * self._batch_size)
        while True:
            order, key = rng.permutation(len(self.units)), rng.bytes(32)
            order = np.resize(order, max(len(order), stride))
            for start in range(0, len(order) - stride + 1, stride):
                slots = order[start : start + stride][mine]
                rngs = [self._rng(key, slot) for slot in slots]
                tokens_BT, labels_BT = self.samples.batch(self.units[slots], rngs=rngs)
                yield {"input": tokens_BT}, labels_BT

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict, "a loader keeps no state"
