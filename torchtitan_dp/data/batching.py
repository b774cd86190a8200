"""From a draw of units to the microbatches of one rank; ranks agree on each step before its update.

Samples are `dataset`'s. Labels are shifted before any sharding (hazard rows 6, 7).

Guarantee:
    - A draw of a unit makes one sample (or a public number, `windows`), cut or padded, never packed
      with others, each a function of that unit's records and of independent randomness.
    - Microbatches are the same, bit by bit, on every rank of a context-parallel group: each slices
      the same store, which ranks compare at the start.
    - A sample that cannot be read aborts the step on all ranks before the update; until they have
      agreed it is padding, so that no collective blocks. Different draws on different ranks abort
      it too, before any collective that depends on a draw.
    - With `data.length_buckets` a sample's padded length is a public function of its own number of
      tokens (of several windows, the longest's), which depends on the unit and its own random
      choices alone. Padding is behind the last token, where no earlier position of a causal model
      sees it: the gradient is that of the sample padded to T, up to rounding. A step's duration
      depends on drawn records' lengths, and is labelled not private.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_dp.base.process import Fault
from torchtitan_dp.data.dataset import IGNORE_INDEX, Samples
from torchtitan_dp.privacy.sampling import Choices, choices, deal, groups_of

NO_DRAW = 0  # the fingerprint where no step follows
FIXED_KEY = bytes(32)  # a key for the same records and windows each time, to compare losses


class Window(NamedTuple):
    """One window of each of B units."""

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64, shifted
    share_B: Tensor | None  # fp32: 1 / the unit's windows that have a target; None if K is 1

    def scale_losses(self, loss_B: Tensor) -> Tensor:
        """Scale these windows' losses, so that a unit's add up to their mean."""
        return loss_B if self.share_B is None else loss_B * self.share_B


class Microbatch(NamedTuple):
    """The samples of B units, each of K windows (`data.windows_per_draw`), in a row. Padding has
    `valid_B` False, ignored labels and position -1."""

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64, shifted
    valid_B: Tensor  # bool
    positions_B: Tensor  # int64 on the CPU: indices in the population, private

    def windows(self) -> list[Window]:
        """Split it into the units' first windows, their second ones, and so on. A unit's mean is
        over its windows with a target, whose number depends on that unit alone."""
        count, share_B = len(self.tokens_BT) // max(len(self.valid_B), 1), None
        if count > 1:
            has_target_BK = (self.labels_BT != IGNORE_INDEX).any(dim=1).view(-1, count)
            share_B = 1.0 / has_target_BK.sum(dim=1).clamp(min=1)
        parts = ((self.tokens_BT[k::count], self.labels_BT[k::count]) for k in range(count))
        return [Window(*part, share_B) for part in parts]

    def split(self, batch_size: int | None) -> Iterator["Microbatch"]:
        """Yield parts of at most `batch_size` units, or all at once if it is None."""
        size = batch_size or len(self.valid_B)
        split = (tensor.split(len(tensor) // len(self.valid_B) * size) for tensor in self)
        for parts in zip(*split, strict=True):
            yield Microbatch(*parts)


class Draw(NamedTuple):
    """The units that one step draws, the same on all ranks."""

    positions: np.ndarray  # int64 (n,), in the loader's `units`
    key: bytes = FIXED_KEY  # 32 bytes, for the choice of records and windows

    def fingerprint(self) -> int:
        """Hash the draw to 62 bits, under its key, so that equal draws of two steps differ. SECRET:
        for a collective alone, never logged, saved or published."""
        hashed = hashlib.blake2b(self.positions.tobytes(), key=self.key, digest_size=8)
        return int.from_bytes(hashed.digest(), "little") >> 2


class DealtMicrobatch(NamedTuple):
    """One microbatch of one rank, before it is read: its padded length, and its units."""

    length: int
    slots: np.ndarray  # int64 (B K,): in the loader's `units`, each K times in a row; -1: padding


@dataclass(eq=False)
class RecordLoader:
    """Samples of the training units, for one data-parallel rank. It keeps no state: each step's
    units are drawn afresh, from keys that no checkpoint contains."""

    samples: Samples
    units: np.ndarray  # the population: those of `samples` to train on; draws are indices in it
    _: KW_ONLY
    ranks: int  # data-parallel degree
    rank: int  # equal within a context-parallel group
    batch_size: int  # B, units in a microbatch
    windows: int = 1  # K, samples of each unit
    fingerprint: str = ""  # hash of the data and its split; private
    settings: Mapping[str, object] = field(default_factory=dict)  # in the fingerprint, by key
    describe: Callable[[], Sequence[str]] = list  # lines about the records; private
    shuffle_seed: int = 0  # for the baseline without privacy
    secure_draws: bool = False  # whether choices are from a cryptographic generator
    _groups: dict[int, list[np.ndarray]] = field(default_factory=dict, init=False)

    def groups(self, count: int) -> list[np.ndarray]:
        """Divide the population into groups that take turns, the same ones in every run."""
        if count == 1:
            return [np.arange(len(self.units))]
        if count not in self._groups:
            self._groups[count] = groups_of(self.samples.units.hashes[self.units], count)
        return self._groups[count]

    def lengths(self, draw: Draw, ladder: tuple[int, ...]) -> np.ndarray:
        """Find each drawn unit's padded length: the shortest rung that fits its longest window."""
        if len(ladder) == 1:
            return np.full(len(draw.positions), ladder[0])
        rngs = [self.rng(draw.key, position) for position in draw.positions]
        chosen = zip(self.units[draw.positions].tolist(), rngs, strict=True)
        counts = [self.samples.tokens(unit, rng, self.windows) for unit, rng in chosen]
        return np.array(ladder)[np.searchsorted(ladder, counts)]

    def rng(self, key: bytes, position: int) -> Choices | None:
        """Start a drawn unit's generator; None if samples are not random, and for padding."""
        is_needed = self.samples.is_random and position >= 0
        return choices(key, int(position), secure=self.secure_draws) if is_needed else None

    def deal(self, draw: Draw, ladder: tuple[int, ...]) -> list[DealtMicrobatch]:
        """Return this rank's microbatches of a draw, padded to lengths of a rising ladder: on every
        rank as many, of the same lengths, the longest first, filled up with padding."""
        lengths = self.lengths(draw, ladder)
        terms = {"ranks": self.ranks, "rank": self.rank, "batch_size": self.batch_size}
        return [
            DealtMicrobatch(int(length), np.repeat(slots, self.windows))
            for length in np.unique(lengths)[::-1]
            for slots in deal(draw.positions[lengths == length], **terms)
        ]

    def microbatch(self, dealt: DealtMicrobatch, key: bytes = FIXED_KEY) -> Microbatch:
        """Make a microbatch on the CPU, with the step's key; raise OSError if the disk failed."""
        rngs = [self.rng(key, slot) for slot in dealt.slots]
        units = np.where(dealt.slots >= 0, self.units[dealt.slots], -1)
        both = self.samples.batch(units, dealt.length, rngs, windows=self.windows)
        positions_B = torch.from_numpy(dealt.slots[:: self.windows].copy())
        return Microbatch(*both, positions_B >= 0, positions_B)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield shuffled batches without end, for the baseline WITHOUT privacy only."""
        rng = np.random.default_rng(self.shuffle_seed)
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


@dataclass(eq=False)
class Feed:
    """The microbatches of one rank, step after step."""

    loader: RecordLoader  # this data-parallel rank's
    ladder: tuple[int, ...]  # padded lengths of samples, rising
    device: torch.device  # of microbatches and of the process groups
    _agreed: Draw | None = field(default=None, init=False)
    _failure: OSError | None = field(default=None, init=False)

    def padding(self, length: int) -> Microbatch:
        """Make a microbatch of padding, without reading a record."""
        slots = np.full(self.loader.batch_size * self.loader.windows, -1)
        return self._on_device(self.loader.microbatch(DealtMicrobatch(length, slots)))

    def microbatches(self, draw: Draw, following: Draw | None = None) -> Iterator[Microbatch]:
        """Yield this rank's share of `draw`: the previous call's `following`, where it had one.

        Collective over the world: `require_same_step` before the last microbatch is yielded, and
        before the first of a draw that was no `following`.
        """
        if draw is not self._agreed:
            require_same_step(None, draw.fingerprint(), self.device)
        every = self.loader.deal(draw, self.ladder)
        for dealt in every[:-1]:
            yield self._made(dealt, draw.key)
        last = [self._made(dealt, draw.key) for dealt in every[-1:]]
        fingerprint = NO_DRAW if following is None else following.fingerprint()
        require_same_step(self._failure, fingerprint, self.device)
        self._agreed = following
        yield from last

    def _made(self, dealt: DealtMicrobatch, key: bytes) -> Microbatch:
        try:
            return self._on_device(self.loader.microbatch(dealt, key))
        except OSError as error:
            self._failure = self._failure or error
            return self.padding(dealt.length)

    def _on_device(self, made: Microbatch) -> Microbatch:
        """Copy all but the positions to a GPU, asynchronously, from pinned memory."""
        if self.device.type != "cuda":
            return made
        copies = (tensor.pin_memory().to(self.device, non_blocking=True) for tensor in made[:3])
        return Microbatch._make([*copies, made.positions_B])


def require_same_step(failure: OSError | None, fingerprint: int, device: torch.device) -> None:
    """Refuse the step on all ranks, by Fault, if one of them failed to read a sample, or if they
    drew different units for the next one, by its `Draw.fingerprint` (SECRET), or `NO_DRAW`.

    Collective: an all-reduce of three int64 over the world, if there is a process group. If no rank
    raises, all hold the same draw, but for a probability of 2^-62. Different ones occur: numpy's
    binomial uses each machine's libm.
    """
    numbers = [failure is not None, fingerprint, -fingerprint]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    failed, highest, negated_lowest = mine.tolist()
    if failure is not None:
        raise Fault(
            f"a sample could not be read (not private: {type(failure).__name__}: {failure})"
        ) from failure
    if failed:
        raise Fault("a sample could not be read on another rank, whose own line says why")
    if highest != -negated_lowest:  # exact: integers
        raise Fault(
            "the ranks drew different units from one key, since their machines (CPU, libm, numpy) "
            "compute random numbers differently; the step was not taken: train on like machines"
        )
