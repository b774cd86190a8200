"""From a draw of units to the microbatches of one data-parallel rank.

`feed` makes the same microbatches ahead of time, once per context-parallel group.

Guarantee, with `data.length_buckets`:
    A sample's padded length is a public function of its own number of tokens, whatever else is
    drawn and on whatever mesh: nothing is rounded up to a neighbour's length. That number depends
    on the unit alone (with `data.unit_sampling = "random"`, on its own random choice of a record
    too; of several windows, the longest counts). Only padding behind the last token is left out,
    which a causal model's earlier positions never see and whose labels are ignored, so that the
    sample's gradient is that of the sample padded to T, up to rounding. Epsilon does not change. A
    step's duration, its number of microbatches and their order of summation (rounding) do depend on
    the lengths of drawn records: timing is labelled not private.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.samples.samples import IGNORE_INDEX, SampleStore
from torchtitan_dp.privacy.sampling import Choices, choices, deal, groups_of

EVER_SAME = bytes(32)  # a key for the same records and windows each time, to compare losses
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
_UNKNOWN = -1


class Window(NamedTuple):
    """One window of each of B units."""

    tokens_BT: torch.Tensor  # int64
    labels_BT: torch.Tensor  # int64, shifted
    share_B: torch.Tensor | None  # fp32: of the unit's mean, 1 / its windows; None: it has one

    def of_mean(self, loss_B: torch.Tensor) -> torch.Tensor:
        """Scale these windows' losses, so that a unit's add up to their mean."""
        return loss_B if self.share_B is None else loss_B * self.share_B


class Microbatch(NamedTuple):
    """The samples of B units; padding has `valid_B` False, ignored labels and position -1.

    Each unit has K windows (`data.windows_per_draw`), consecutive in the first dimension, which is
    B K long.
    """

    tokens_BT: torch.Tensor  # int64
    labels_BT: torch.Tensor  # int64, shifted
    valid_B: torch.Tensor  # bool
    positions_B: torch.Tensor  # int64 on the CPU: indices in the population, private

    @property
    def windows_per_unit(self) -> int:
        """K."""
        return len(self.tokens_BT) // max(len(self.valid_B), 1)

    def windows(self) -> list[Window]:
        """Split it into the units' first windows, their second ones, and so on.

        A unit's mean is over its windows with a target, whose number depends on that unit alone.
        """
        count = self.windows_per_unit
        if count == 1:
            return [Window(self.tokens_BT, self.labels_BT, None)]
        has_target_BK = (self.labels_BT != IGNORE_INDEX).any(dim=1).view(-1, count)
        share_B = 1.0 / has_target_BK.sum(dim=1).clamp(min=1)
        return [
            Window(self.tokens_BT[k::count], self.labels_BT[k::count], share_B)
            for k in range(count)
        ]

    def to(self, device: torch.device) -> "Microbatch":
        """Copy all but the positions to a device, asynchronously from pinned memory."""
        tokens_BT, labels_BT, valid_B = (
            tensor.to(device, non_blocking=True)
            for tensor in (self.tokens_BT, self.labels_BT, self.valid_B)
        )
        return Microbatch(tokens_BT, labels_BT, valid_B, self.positions_B)

    def split(self, batch_size: int | None) -> Iterator["Microbatch"]:
        """Yield parts of at most `batch_size` units, or all at once if it is None."""
        size = batch_size or len(self.valid_B)
        sizes = [len(tensor) // len(self.valid_B) * size for tensor in self]
        split = (tensor.split(rows) for tensor, rows in zip(self, sizes, strict=True))
        for parts in zip(*split, strict=True):
            yield Microbatch(*parts)


class Dealt(NamedTuple):
    """The units and the length of one microbatch of one data-parallel rank."""

    length: int  # padded length of its samples
    # int64 (B K,): indices in the loader's `units`, each K times in a row; -1 is padding
    slots: np.ndarray


class RecordLoader:
    """Samples of the training units, for one data-parallel rank.

    Stateless: each step's units are drawn afresh from secrets, so that a checkpoint contains none.
    """

    def __init__(
        self,
        samples: SampleStore,
        units: np.ndarray,
        *,
        ranks: int,
        rank: int,
        batch_size: int,
        windows: int = 1,
        fingerprint: str = "",
        settings: Mapping[str, object] | None = None,
        shuffle_seed: int = 0,
        secure_draws: bool = False,
    ) -> None:
        """
        Args:
            units: the population: the units of `samples` to train on; draws are indices in it.
            ranks, rank: data-parallel degree and rank, equal within a context-parallel group.
            batch_size: B, units in a microbatch.
            windows: K, samples of each unit.
            fingerprint: hash of the data and its split; private.
            settings: the settings that the fingerprint depends on, by key.
            shuffle_seed: for the baseline without privacy.
            secure_draws: whether choices are from a cryptographic generator.
        """
        self.samples, self.units, self.fingerprint = samples, units, fingerprint
        self.ranks, self.rank, self.batch_size, self.windows = ranks, rank, batch_size, windows
        self.settings = settings or {}
        self.counts = TokenCounts(samples, batch_size)
        self._shuffle_seed, self._secure_draws = shuffle_seed, secure_draws
        self._groups: dict[int, list[np.ndarray]] = {}  # by their number

    def groups(self, count: int) -> list[np.ndarray]:
        """Divide the population into groups that take turns, the same ones in every run."""
        if count == 1:
            return [np.arange(len(self.units))]
        if count not in self._groups:
            hashes = np.concatenate(list(self.samples.units.hashes()))
            self._groups[count] = groups_of(hashes[self.units], count)
        return self._groups[count]

    def sources(self, draw: np.ndarray, key: bytes = EVER_SAME) -> np.ndarray:
        """List the sources of each drawn unit's samples (`SampleStore.chosen`), int64
        (n, at most K), filled up with -1.
        """
        units = ((int(self.units[p]), self.rng(key, p)) for p in draw)
        rows = [self.samples.chosen(*unit, self.windows) for unit in units]
        found = np.full((len(rows), max(map(len, rows), default=1)), -1, dtype=np.int64)
        for row, sources in zip(found, rows, strict=True):
            row[: len(sources)] = sources
        return found

    def lengths(
        self,
        draw: np.ndarray,
        ladder: tuple[int, ...],
        device: torch.device,
        key: bytes = EVER_SAME,
        count: Callable[[int], int] | None = None,
    ) -> np.ndarray:
        """Find each drawn unit's padded length: a function of its own number of tokens, in the
        longest of its windows.

        Args:
            key: this step's, as passed to `microbatches`.
            device, count: for `TokenCounts.of`.

        Collective (of `TokenCounts`), unless `ladder` has one length.
        """
        if len(ladder) == 1:
            return np.full(len(draw), ladder[0])
        sources = self.sources(draw, key)
        is_one, counts = sources >= 0, np.zeros_like(sources)
        counts[is_one] = self.counts.of(sources[is_one], device, count)
        return padded_lengths(counts.max(axis=1, initial=0), ladder)

    def rng(self, key: bytes, position: int) -> Choices | None:
        """Start a drawn unit's generator; None if samples are not random, and for padding."""
        is_needed = self.samples.is_random and position >= 0
        secure = self._secure_draws
        return choices(key, int(position), secure=secure) if is_needed else None

    def deal(
        self, draw: np.ndarray, lengths: np.ndarray | None = None, rank: int | None = None
    ) -> list[Dealt]:
        """Deal out a draw over ranks and microbatches.

        Args:
            draw: global positions in `units`, the same on every rank.
            lengths: padded lengths, the same on every rank; `seq_len` if None.
            rank: the receiving data-parallel rank; this one, if None.

        Every rank gets the same number of microbatches of the same lengths in the same order,
        filled up with padding. Each length is dealt out by itself, the longest first, so that ranks
        in lockstep compute equally much and no sample is padded to another's length. This costs at
        most one more microbatch for each length, whose lengths together are below 2T.
        """
        if lengths is None:
            lengths = np.full(len(draw), self.samples.seq_len)
        rank = self.rank if rank is None else rank
        return [
            Dealt(int(length), np.repeat(slots, self.windows))
            for length in np.unique(lengths)[::-1]
            for slots in deal(
                draw[lengths == length], ranks=self.ranks, rank=rank, batch_size=self.batch_size
            )
        ]

    def microbatches(
        self, draw: np.ndarray, lengths: np.ndarray | None = None, key: bytes = EVER_SAME
    ) -> Iterator[Microbatch]:
        """Yield this rank's share of a draw, making each microbatch on demand.

        Args:
            draw: global positions in `units`, the same on every rank.
            lengths: padded lengths, the same on every rank; `seq_len` if None.
            key: this step's, the same on every rank, for the choice of records and windows.
        """
        for length, slots in self.deal(draw, lengths):
            valid = slots >= 0
            rngs = [self.rng(key, slot) for slot in slots]
            units = np.where(valid, self.units[slots], -1)
            both = self.samples.batch(units, length, rngs, windows=self.windows)
            positions_B = torch.from_numpy(slots[:: self.windows].copy())
            yield Microbatch(*both, positions_B >= 0, positions_B)

    def __iter__(self) -> Iterator[Batch]:
        """Yield shuffled fixed-size batches without end, for the baseline WITHOUT privacy only.

        Samples are `seq_len` long, with any `data.length_buckets`.
        """
        rng = np.random.default_rng(self._shuffle_seed)
        stride = self.ranks * self.batch_size
        mine = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        while True:
            order, key = rng.permutation(len(self.units)), rng.bytes(32)
            order = np.resize(order, max(len(order), stride))
            for start in range(0, len(order) - stride + 1, stride):
                slots = order[start : start + stride][mine]
                rngs = [self.rng(key, slot) for slot in slots]
                tokens_BT, labels_BT = self.samples.batch(self.units[slots], rngs=rngs)
                yield {"input": tokens_BT}, labels_BT

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict, "a loader keeps no state"


class TokenCounts:
    """Token counts of samples, made when first drawn, alike on all ranks.

    PRIVATE, like the records: in memory only, never logged, saved or put in a checkpoint.
    """

    def __init__(self, samples: SampleStore, at_once: int) -> None:
        """
        Args:
            at_once: how many samples, at most, a rank counts between collectives.
        """
        self._samples, self._at_once = samples, at_once
        self._counts: np.ndarray | None = None  # 4 bytes a source, once needed

    def share(self, sources: np.ndarray) -> np.ndarray:
        """List this rank's share of the unknown `sources`, which the next `of` counts."""
        ranks, rank = _world()
        return self._unknown(sources)[rank::ranks]

    def of(
        self,
        sources: np.ndarray,
        device: torch.device,
        count: Callable[[int], int] | None = None,
    ) -> np.ndarray:
        """Count the tokens of `sources`, int64 and alike on every rank.

        Every rank counts its share of those not known yet, and all take the sum: even if one cannot
        read a record that others can, they agree on how to deal out the draw, so that no record is
        processed twice. Rounds bound the wait for another rank to `at_once` samples, each of
        bounded time (`excerpts.most_bytes`).

        Collective: for every `at_once` unknown samples a rank, an all-reduce over the world of 4
        bytes each, if there is a process group. Rank 0 reports progress on stderr every 5 seconds.

        Args:
            device: the process group's.
            count: counts a source's tokens; `SampleStore.tokens` if None.
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
    """Return the number of ranks, and this one's."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def padded_lengths(counts: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Find the shortest of `lengths` that fits each number of tokens, or else the last.

    >>> padded_lengths(np.array([0, 4, 5, 100]), (4, 8, 100))
    array([  4,   4,   8, 100])
    """
    return np.array(lengths)[np.searchsorted(lengths, counts)]
