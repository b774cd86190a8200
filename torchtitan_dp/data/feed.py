"""Microbatches made in the background while others are computed.

The ranks of a context-parallel (cp) group take turns to make samples, and send them to each other.
While a step runs, one thread makes the samples of the next microbatches, and another counts the
tokens of the next draw, so that its first microbatches are made before its step begins.

Guarantee:
    Microbatches are those of `RecordLoader.microbatches`, in the same order and bit by bit, on
    every rank of the cp group. Collectives run only in the caller's thread, in an order that
    depends on draws and lengths alone, hence alike on all ranks. A sample that cannot be made (a
    failing disk, a bug) aborts the step on all ranks before the update. Until they have agreed, the
    sample is zeros, so that no collective blocks. Different draws on different ranks abort it too:
    a draw is compared before any collective that depends on it, together with the agreement on the
    previous step, or alone if there is none.
"""

import functools
import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_dp.data.agreement import NO_DRAW, require_same_step
from torchtitan_dp.data.background import Background
from torchtitan_dp.data.batching import EVER_SAME, Dealt, Microbatch, RecordLoader

T = TypeVar("T")

SAMPLES_AHEAD = 2
"""About how many samples a rank makes ahead: with the one in use, 8 bytes a token."""


class ContextGroup(NamedTuple):
    """The ranks that share a sample; the world is numbered group by group."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0  # this one's, within the group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "ContextGroup":
        """Describe a process group; None is this rank alone."""
        if group is None:
            return cls()
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    @classmethod
    def over(cls, mesh: DeviceMesh | None) -> "ContextGroup":
        """Describe the ranks of a one-dimensional mesh; None is this rank alone."""
        return cls.of(None if mesh is None else mesh.get_group())

    def maker(self, number: int, slots: np.ndarray, row: int) -> int:
        """Choose the rank of the group that makes a sample, in turns over all microbatches.

        Args:
            number: the microbatch's index in its step.
            slots: the microbatch's (`batching.Dealt`).
            row: the sample's index in `slots`.
        """
        return (number * len(slots) + row) % self.size


ALONE = ContextGroup()


class Draw(NamedTuple):
    """The units that one step draws, the same on all ranks."""

    positions: np.ndarray  # int64 (n,), in the loader's `units`
    key: bytes = EVER_SAME  # 32 bytes, for the choice of records and windows

    def fingerprint(self) -> int:
        """Hash the draw to 62 bits, under its key.

        SECRET, like the draw: for a collective alone, never logged, saved or published. Keys are
        per step, so that equal draws of two steps have different fingerprints.
        """
        hashed = hashlib.blake2b(self.positions.tobytes(), key=self.key, digest_size=8)
        return int.from_bytes(hashed.digest(), "little") >> 2


class _Row(NamedTuple):
    """A sample of a microbatch that this rank makes."""

    row: int
    sample_2L: torch.Tensor  # int32: tokens and labels, to be filled in
    undecodable: "Future[int]"  # records, once it is made


class _Step:
    """A draw and the progress of its preparation."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.counts: dict[int, Future[int]] = {}  # by source, until ranks have exchanged them
        self.dealt: list[Dealt] | None = None
        self.begun = 0  # number of microbatches begun, taken ones included
        self.ahead: deque[list[_Row]] = deque()


class Feed:
    """The microbatches of one rank, step after step."""

    def __init__(
        self,
        loader: RecordLoader,
        ladder: tuple[int, ...],
        device: torch.device,
        cp: ContextGroup = ALONE,
    ) -> None:
        """
        Args:
            loader: this data-parallel rank's.
            ladder: padded lengths of samples, rising.
            device: the device of microbatches and of the process groups.
            cp: the ranks that get the same microbatches.
        """
        self.loader, self.device = loader, device
        self._ladder, self._cp = ladder, cp
        # One thread each, so that only one sample's text is in memory at a time.
        self._samples, self._counts = Background("samples"), Background("counts")
        self._next: _Step | None = None
        self._failure: BaseException | None = None
        self._undecodable = torch.zeros((), dtype=torch.int64, device=device)
        # As many microbatches as hold SAMPLES_AHEAD samples of each rank.
        samples = loader.batch_size * loader.windows
        self._depth = max(1, -(-SAMPLES_AHEAD * cp.size // samples))

    @property
    def undecodable(self) -> int:
        """The number of undecodable records in this rank's microbatches, repeats included: computed
        from private records, for the log, labelled not private.
        """
        return int(self._undecodable.item())

    def close(self) -> None:
        """End the threads after their jobs in progress, a sample each, or after a few seconds."""
        self._samples.close()
        self._counts.close()

    def padding(self, length: int) -> Microbatch:
        """Make a microbatch of padding, as for a rank without drawn units, reading no record.
        Collective over cp: the all-reduce of one microbatch.
        """
        slots = np.full(self.loader.batch_size * self.loader.windows, -1)
        step, dealt = _Step(Draw(np.empty(0, np.int64))), Dealt(length, slots)
        return self._put_together(dealt, self._begin_rows(step, 0, dealt))

    def make_room(self) -> None:
        """Allocate the token counts of all units, before any is drawn."""
        if len(self._ladder) > 1:
            self.loader.counts.share(np.empty(0, dtype=np.int64))

    def microbatches(self, draw: Draw, following: Draw | None = None) -> Iterator[Microbatch]:
        """Yield this rank's share of a draw, and prepare the next.

        Args:
            draw: this step's: the previous step's `following` object, if there was one.
            following: the next step's, if there will be one.

        Collective, on every rank alike: those of `TokenCounts` over the world; for each microbatch,
        if cp has several ranks, an all-reduce over cp of its tokens and labels (8 bytes a token;
        zeros except on the ranks that made them); before the last is yielded, and before the first
        of a draw that was not a step's `following`, three numbers over the world
        (`require_same_step`).

        Raises:
            Fault: on all ranks, instead of the first or last microbatch: they drew different units
                for this step or the next, or one of them could not make a sample.
        """
        step, self._next = self._next, None
        if step is None or step.draw is not draw:
            require_same_step(None, draw.fingerprint(), self.device)
            step = self._begin(draw)
        self._deal(step)
        assert step.dealt is not None
        if following is not None:
            self._next = self._begin(following)
        for number, dealt in enumerate(step.dealt):
            self._make_ahead(step, number + 1 + self._depth)
            microbatch = self._put_together(dealt, step.ahead.popleft())
            if number + 1 == len(step.dealt):
                self._end()
            yield microbatch
        if not step.dealt:
            self._end()

    def _begin(self, draw: Draw) -> _Step:
        """Start counting the tokens of this rank's share of a draw's new units."""
        step = _Step(draw)
        if len(self._ladder) > 1:
            sources = self.loader.sources(*draw)
            for source in self.loader.counts.share(sources[sources >= 0]).tolist():
                count = functools.partial(self.loader.samples.tokens, source)
                step.counts[source] = self._counts.submit(count)
        return step

    def _deal(self, step: _Step) -> None:
        """Exchange a draw's lengths and deal it out. Collective, unless that was done."""
        if step.dealt is not None:
            return

        def count(source: int) -> int:
            return self._result(step.counts[source]) or 0

        positions, key = step.draw
        lengths = self.loader.lengths(positions, self._ladder, self.device, key, count)
        step.counts.clear()
        step.dealt = self.loader.deal(positions, lengths)

    def _end(self) -> None:
        """Require that no rank failed and that all agree on the next draw, and begin its first
        microbatches.
        """
        drawn = NO_DRAW if self._next is None else self._next.draw.fingerprint()
        require_same_step(self._failure, drawn, self.device)
        if self._next is not None:
            self._deal(self._next)
            self._make_ahead(self._next, self._depth)

    def _make_ahead(self, step: _Step, stop: int) -> None:
        """Begin this rank's samples of the microbatches before number `stop`."""
        assert step.dealt is not None
        for number in range(step.begun, min(stop, len(step.dealt))):
            step.ahead.append(self._begin_rows(step, number, step.dealt[number]))
            step.begun = number + 1

    def _begin_rows(self, step: _Step, number: int, dealt: Dealt) -> list[_Row]:
        rows = []
        for row, position in enumerate(dealt.slots.tolist()):
            if self._cp.maker(number, dealt.slots, row) == self._cp.rank:
                sample_2L = self._empty(dealt.length)
                window = row % self.loader.windows
                made = self._make(position, step.draw.key, sample_2L.numpy(), window)
                rows.append(_Row(row, sample_2L, made))
        return rows

    def _make(self, position: int, key: bytes, sample_2L: np.ndarray, window: int) -> "Future[int]":
        samples = self.loader.samples
        unit = int(self.loader.units[position]) if position >= 0 else -1

        def make() -> int:
            rng = self.loader.rng(key, position)
            excerpt = samples.excerpt(unit, rng, window, self.loader.windows)
            samples.lay_out(excerpt, *sample_2L)
            return excerpt.undecodable

        return self._samples.submit(make)

    def _put_together(self, dealt: Dealt, rows: list[_Row]) -> Microbatch:
        """Wait for this rank's samples and receive the others'. Collective over cp."""
        count, slots = len(dealt.slots), dealt.slots
        # The last column is the number of undecodable records.
        both_2BL = torch.zeros((2, count, dealt.length + 1), dtype=torch.int32, device=self.device)
        for row, sample_2L, future in rows:
            undecodable = self._result(future)
            if undecodable is not None:
                both_2BL[:, row, :-1].copy_(sample_2L, non_blocking=True)
                both_2BL[0, row, -1] = undecodable
        if self._cp.size > 1:
            dist.all_reduce(both_2BL, group=self._cp.group)
        tokens_BT, labels_BT = both_2BL[:, :, :-1].long()
        self._undecodable += both_2BL[0, :, -1].sum()
        drawn = slots[:: self.loader.windows]
        valid = drawn >= 0
        self.loader.samples.hand_out(np.where(valid, self.loader.units[drawn], -1))
        valid_B = torch.from_numpy(valid)
        if self.device.type == "cuda":
            valid_B = valid_B.pin_memory().to(self.device, non_blocking=True)
        return Microbatch(tokens_BT, labels_BT, valid_B, torch.from_numpy(drawn.copy()))

    def _result(self, future: "Future[T]") -> T | None:
        """Wait for a job; if it failed, keep its error for the step's end and return None."""
        error = future.exception()
        if error is None:
            return future.result()
        self._failure = self._failure or error
        return None

    def _empty(self, length: int) -> torch.Tensor:
        """Allocate a sample in memory from which the device can copy asynchronously."""
        pinned = self.device.type == "cuda"
        return torch.empty((2, length), dtype=torch.int32, pin_memory=pinned)
