"""From a draw of units to the microbatches of one rank; ranks agree on each step before its update.

Guarantee:
    Microbatches are those of `RecordLoader.deal`, in the same order and bit by bit, on every rank
    of a context-parallel group: each slices the same store, which ranks compare at the start. A
    sample that cannot be read (a failing disk) aborts the step on all ranks before the update;
    until they have agreed it is padding, so that no collective blocks. Different draws on different
    ranks abort it too: a draw is compared before any collective that depends on it, together with
    the agreement on the previous step, or alone if there is none.

Guarantee, with `data.length_buckets`:
    A sample's padded length is a public function of its own number of tokens (of several windows,
    the longest's), and of no other draw or mesh. That number depends on the unit and its own random
    choices alone. Only padding behind the last token is left out, which a causal model's earlier
    positions never see and whose labels are ignored: the gradient is that of the sample padded to
    T, up to rounding, and epsilon does not change. A step's duration, its number of microbatches
    and their order of summation depend on drawn records' lengths: timing is labelled not private.
"""

import hashlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.data.samples import IGNORE_INDEX, Samples
from torchtitan_dp.privacy.sampling import Choices, choices, deal, groups_of
from torchtitan_dp.process import Fault

NO_DRAW = 0  # the fingerprint where no step follows
EVER_SAME = bytes(32)  # a key for the same records and windows each time, to compare losses


class Window(NamedTuple):
    """One window of each of B units."""

    tokens_BT: torch.Tensor  # int64
    labels_BT: torch.Tensor  # int64, shifted
    share_B: torch.Tensor | None  # fp32: of the unit's mean, 1 / its windows; None: it has one

    def of_mean(self, loss_B: torch.Tensor) -> torch.Tensor:
        """Scale these windows' losses, so that a unit's add up to their mean."""
        return loss_B if self.share_B is None else loss_B * self.share_B


class Microbatch(NamedTuple):
    """The samples of B units, each of K windows (`data.windows_per_draw`), consecutive in the first
    dimension, B K long. Padding has `valid_B` False, ignored labels and position -1."""

    tokens_BT: torch.Tensor  # int64
    labels_BT: torch.Tensor  # int64, shifted
    valid_B: torch.Tensor  # bool
    positions_B: torch.Tensor  # int64 on the CPU: indices in the population, private

    def windows(self) -> list[Window]:
        """Split it into the units' first windows, their second ones, and so on.

        A unit's mean is over its windows with a target, whose number depends on that unit alone.
        """
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
    key: bytes = EVER_SAME  # 32 bytes, for the choice of records and windows

    def fingerprint(self) -> int:
        """Hash the draw to 62 bits, under its key, so that equal draws of two steps differ. SECRET:
        for a collective alone, never logged, saved or published."""
        hashed = hashlib.blake2b(self.positions.tobytes(), key=self.key, digest_size=8)
        return int.from_bytes(hashed.digest(), "little") >> 2


class Dealt(NamedTuple):
    """One microbatch of one rank: its padded length, and its units."""

    length: int
    slots: np.ndarray  # int64 (B K,): in the loader's `units`, each K times in a row; -1: padding


@dataclass(eq=False)
class RecordLoader:
    """Samples of the training units, for one data-parallel rank.

    Stateless: each step's units are drawn afresh from secrets, so that a checkpoint contains none.
    """

    samples: Samples
    units: np.ndarray  # the population: those of `samples` to train on; draws are indices in it
    _: KW_ONLY
    ranks: int  # data-parallel degree
    rank: int  # equal within a context-parallel group
    batch_size: int  # B, units in a microbatch
    windows: int = 1  # K, samples of each unit
    fingerprint: str = ""  # hash of the data and its split; private
    settings: Mapping[str, object] = field(default_factory=dict)  # that it depends on, by key
    describe: Callable[[], Sequence[str]] = list  # writes lines about the records; private
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

    def deal(self, draw: Draw, ladder: tuple[int, ...]) -> list[Dealt]:
        """Return this rank's microbatches of a draw, padded to lengths of a rising ladder.

        Every rank gets as many microbatches of the same lengths in the same order, filled up with
        padding. Each length is dealt out by itself, the longest first: at most one more microbatch
        for each, whose lengths together are below 2T.
        """
        lengths, dealt = self.lengths(draw, ladder), []
        terms = {"ranks": self.ranks, "rank": self.rank, "batch_size": self.batch_size}
        for length in np.unique(lengths)[::-1]:
            for slots in deal(draw.positions[lengths == length], **terms):
                dealt.append(Dealt(int(length), np.repeat(slots, self.windows)))
        return dealt

    def microbatch(self, dealt: Dealt, key: bytes = EVER_SAME) -> Microbatch:
        """Make a microbatch on the CPU, with the step's key; raise OSError if the disk failed."""
        rngs = [self.rng(key, slot) for slot in dealt.slots]
        units = np.where(dealt.slots >= 0, self.units[dealt.slots], -1)
        both = self.samples.batch(units, dealt.length, rngs, windows=self.windows)
        positions_B = torch.from_numpy(dealt.slots[:: self.windows].copy())
        return Microbatch(*both, positions_B >= 0, positions_B)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
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
        return self._on_device(self.loader.microbatch(Dealt(length, slots)))

    def microbatches(self, draw: Draw, following: Draw | None = None) -> Iterator[Microbatch]:
        """Yield this rank's share of a draw: of the previous step's `following`, if there was one.

        Collective, on every rank alike, over the world: three numbers (`require_same_step`) before
        the last microbatch is yielded, and before the first of a draw that was no `following`.
        """
        if draw is not self._agreed:
            require_same_step(None, draw.fingerprint(), self.device)
        every = self.loader.deal(draw, self.ladder)
        for dealt in every[:-1]:
            yield self._made(dealt, draw.key)
        last = [self._made(dealt, draw.key) for dealt in every[-1:]]
        drawn = NO_DRAW if following is None else following.fingerprint()
        require_same_step(self._failure, drawn, self.device)
        self._agreed = following
        yield from last

    def _made(self, dealt: Dealt, key: bytes) -> Microbatch:
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


def require_same_step(failure: BaseException | None, drawn: int, device: torch.device) -> None:
    """Refuse the step on all ranks, by Fault, if one of them failed to read a sample, or if they
    drew different units for the next one: `drawn` is its `Draw.fingerprint` (SECRET), or `NO_DRAW`.

    Collective: an all-reduce of three int64 over the world, if there is a process group; read at
    once, since the sizes of the next collectives depend on the draw.

    Guarantee:
        If no rank raises, all hold the same draw (different ones pass with probability 2^-62), each
        of whose units is dealt out once: numpy's binomial, whose logarithms are each machine's own
        libm's, need not be equal. Exact: the largest must equal minus the largest negated one.
    """
    mine = torch.tensor([failure is not None, drawn, -drawn], dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    failed, highest, negated_lowest = mine.tolist()
    if failure is not None:
        last = traceback.extract_tb(failure.__traceback__)[-1:]
        where = "".join(f" ({os.path.basename(of.filename)}, line {of.lineno})" for of in last)
        reason = f"{type(failure).__name__}: {failure}{where}"  # may contain private data
        raise Fault(f"a sample could not be read (not private: {reason})") from failure
    if failed:
        raise Fault("a sample could not be read on another rank, whose own line says why")
    if highest != -negated_lowest:
        raise Fault(
            "the ranks drew different units from one key, so their machines compute random numbers "
            "differently (another CPU, libm or numpy), and the step was not taken: train on "
            "machines that are alike"
        )
