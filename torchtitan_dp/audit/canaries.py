"""Canaries: extra units, drawn like all others, each with a gradient direction of its own.

The white-box gradient canary of Nasr et al. ("Tight Auditing of Differentially Private Machine
Learning", USENIX Security 2023), many at once as in Steinke et al. (NeurIPS 2023): canary j is one
public position of one parameter. A fair coin, secret until the guesses are written, decides whether
it is *included*: then its gradient is `NORM` * C there and 0 elsewhere, set before clipping.
Excluded, it is an empty unit, backpropagated like any other, with a gradient of exactly 0. All else
is the trainer's own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan_dp.data.samples import NOTHING, Samples
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import RowLayout
from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.privacy.sampling import Choices

NORM = 100.0  # of an included canary's gradient before it is clipped, in multiples of C
_PLACES_SEED = 0  # public


@dataclass(frozen=True)
class Canaries:
    """The canaries' places: `positions[j]` of the flattened parameter `names[j]`."""

    names: tuple[str, ...]
    positions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def choose(cls, parameters: dict[str, nn.Parameter], count: int) -> "Canaries":
        """Choose distinct positions, uniform over all trainable values and alike on every rank."""
        ends = np.cumsum([parameter.numel() for parameter in parameters.values()])
        rng = np.random.default_rng(_PLACES_SEED)
        drawn = rng.choice(int(ends[-1]), size=count, replace=False)
        which = np.searchsorted(ends, drawn, side="right")
        names, starts = list(parameters), np.concatenate([[0], ends])
        return cls(
            tuple(names[i] for i in which),
            tuple(int(place) for place in drawn - starts[which]),
        )


def draw_coins(key: bytes, count: int) -> np.ndarray:
    """Toss fair coins, bool (count,), from the 32-byte key of the stream "coin"."""
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return rng.integers(0, 2, size=count).astype(bool)


class PlantedSamples(Samples):
    """The samples of a run, with canaries numbered after its units, from `first` on."""

    def __init__(self, real: Samples, planted: Sequence[np.ndarray]) -> None:
        """
        Args:
            planted: the ids of each canary's sample, int64.
        """
        super().__init__(
            real.store,
            real.seq_len,
            one_record=real.one_record,
            window=real.window,
            has_answers=real.has_answers,
            pad_id=real.pad_id,
        )
        self.first, self._planted = len(real.units), planted

    def ids(
        self, unit: int, rng: Choices | None = None, window: int = 0, windows: int = 1
    ) -> np.ndarray:
        if unit < self.first:
            return super().ids(unit, rng, window, windows)
        return self._planted[unit - self.first] if window == 0 else NOTHING

    def tokens(self, unit: int, rng: Choices | None = None, windows: int = 1) -> int:
        if unit < self.first:
            return super().tokens(unit, rng, windows)
        return max(len(self._planted[unit - self.first]) - 1, 0)


class CanarySamples(PlantedSamples):
    """Samples of units, and of canaries without tokens, whose loss is 0.

    `drawn` is a queue of slots, each a canary's number, or None for a unit or padding, that
    `CanarySum` empties.
    """

    def __init__(self, real: Samples, canaries: int) -> None:
        super().__init__(real, [NOTHING] * canaries)
        self.drawn: deque[int | None] = deque()

    def hand_out(self, units: np.ndarray) -> None:
        canaries = (unit - self.first for unit in units.tolist())
        self.drawn.extend(canary if canary >= 0 else None for canary in canaries)


class CanarySum(ClippedSum):
    """A clipped sum that sets the gradients of included canaries before clipping."""

    takes_groups_early = False  # `add` sees whole samples

    _in_add = False
    _included: np.ndarray  # secret
    _drawn: deque[int | None]
    _spots: list[tuple[str, int, int] | None]

    def plant(self, canaries: Canaries, included: np.ndarray, drawn: deque[int | None]) -> None:
        """Plant canaries, with coins `included`, bool (canaries,), and `CanarySamples.drawn`."""
        self._included, self._drawn = included, drawn
        cp = self.groups.cp_size
        cp_rank = dist.get_rank(self.groups.cp) if self.groups.cp is not None else 0
        self._spots = []
        for name, position in zip(canaries.names, canaries.positions, strict=True):
            layout = RowLayout(self.parameters[name].shape, self.groups.dp_shard_size, cp)
            fsdp_rank, within = divmod(position, layout.chunk_numel)
            dp_shard_rank, owner = divmod(fsdp_rank, cp)
            self._spots.append((name, dp_shard_rank, within) if owner == cp_rank else None)

    def add(self, shards: list[torch.Tensor], valid_B: torch.Tensor) -> Clip:
        for sample in range(len(valid_B)):
            canary = self._drawn.popleft()
            if canary is None or not self._included[canary]:
                continue
            spot = self._spots[canary]
            if spot is not None:
                name, dp_shard_rank, within = spot
                part_BDN = self.part(shards, name)
                part_BDN[sample, dp_shard_rank, within] = NORM * self.policy.max_grad_norm
        self._in_add = True
        clipped = super().add(shards, valid_B)
        self._in_add = False
        return clipped

    def accumulate_part(self, *part: Any) -> None:
        assert self._in_add, "a sample that bypasses `add` has no canary"
        super().accumulate_part(*part)


class ScoreKeeper:
    """Scores without coins: AdamW's gradient at each canary's position, summed over steps."""

    def __init__(
        self, canaries: Canaries, parameters: dict[str, nn.Parameter], optimizer: Any
    ) -> None:
        """Read gradients of DTensors sharded on dim 0 before each step of the optimizer."""
        self._parameters = parameters
        self._mine: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # canaries, and where
        device = next(iter(parameters.values())).device
        names, positions = np.array(canaries.names), np.array(canaries.positions)
        for name in set(canaries.names):
            parameter = cast(DTensor, parameters[name])
            mesh = parameter.device_mesh
            chunk = RowLayout(parameter.shape, mesh.size(), 1).chunk_numel
            here = (names == name) & (positions // chunk == mesh.get_local_rank())
            which = torch.from_numpy(np.flatnonzero(here)).to(device)
            self._mine[name] = which, torch.from_numpy(positions[here] % chunk).to(device)
        self._sums = torch.zeros(len(canaries), dtype=torch.float64, device=device)
        optimizer.register_step_pre_hook(self._add)

    def _add(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, (which, where) in self._mine.items():
            gradient = cast(DTensor, self._parameters[name].grad).to_local().view(-1)
            self._sums[which] += gradient[where].double()

    def scores(self, replicas: int) -> np.ndarray:
        """Return fp64 (canaries,), the same on all ranks, in the units of the gradient, where
        `replicas` (dp_replicate) ranks have the same shard. Collective: an all-reduce over the
        world."""
        total = self._sums.clone()
        dist.all_reduce(total)
        return (total / replicas).cpu().numpy()
