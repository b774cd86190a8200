"""Per-sample gradients for microbatches of several samples: LongShield's V1, V2 and, with AC, V3.

Each layer's backward forms its samples' gradients from this rank's tokens (`layers`). V2 (section
3.2, input-stationary) reduce-scatters them over the context-parallel group while backward continues
and keeps `1 / cp` on each rank (section 3.1). V1, the paper's baseline, keeps them whole and sums
them after backward. With V2, a clip group is added, and freed, within backward.

Guarantee:
    What is added to the `ClippedSum` for sample b is the gradient of loss b over the whole
    context-parallel group. Gradients of different samples are never added before they are clipped.
    Assumes that loss b depends on sample b alone, that each rank of a cp group has the same
    samples, and what `layers` assumes.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import reduce_scatter_sum, sum_together_over_cp
from torchtitan_dp.gradients.layers import Formed, connect_all, layers_of_each_parameter
from torchtitan_dp.gradients.operands import TRANSIENT_BYTES, Write, add_to
from torchtitan_dp.privacy.clipping import Clip


class GradSampleGradients:
    """Per-sample gradients of one microbatch at a time, in a bundle for each parameter."""

    batch_size = None  # any
    makes_gradients: ClassVar[tuple[str, ...]] = ("form", "add")

    def __init__(
        self,
        model: nn.Module,
        clipped_sum: ClippedSum,
        *,
        shard_grad_samples: bool = True,
        transient_bytes: int = TRANSIENT_BYTES,
    ) -> None:
        """
        Args:
            model: converted by `per_sample_layers`, then sharded by FSDP2.
            shard_grad_samples: V2 if True, V1 if False.
            transient_bytes: bound on one layer's unreduced gradients, of at least one sample.
        """
        self.clipped_sum = clipped_sum
        self._cp = clipped_sum.groups.cp
        self._cp_rank = dist.get_rank(self._cp) if self._cp else 0
        self._shard = shard_grad_samples
        self._transient_bytes = transient_bytes
        parameters = clipped_sum.parameters
        connect_all(model, self, parameters)
        self._device = next(iter(parameters.values())).device
        self._layouts = clipped_sum.lay_out_parameters()
        self._shards: dict[str, torch.Tensor] = {}  # (B, dp_shard, rows, …), summed over cp
        self._wholes: dict[str, torch.Tensor] = {}  # (cp, B, dp_shard, rows, …), not yet summed
        self._factors: dict[str, torch.Tensor] = {}  # (B,): what `_shards` is to be multiplied by
        self._in_flight: deque[_Running] = deque()
        early = clipped_sum.takes_groups_early and not clipped_sum.policy.is_flat
        self._early = _WholeGroups(model, clipped_sum) if shard_grad_samples and early else None
        self._valid_B = torch.empty(0)  # of this microbatch
        self._clips: list[Clip] = []  # of groups that were added within backward

    def start_step(self, key: bytes) -> None:
        """Nothing is random here."""

    def hold(self, loss_B: torch.Tensor) -> None:
        """Refuse: each backward pass ends with clipping."""
        raise AssertionError("refused with the configuration: data.windows_per_draw")

    def accumulate_clipped(
        self,
        loss_B: torch.Tensor,
        valid_B: torch.Tensor,
        positions: Sequence[int] | None = None,
    ) -> Clip:
        """Add a microbatch (`methods.GradientMethod`).

        Collectives, over cp: a reduce-scatter per layer within backward, one more after it (V2),
        or an all-reduce per parameter after it (V1); then an all-reduce of B numbers for each clip
        group, with V2 some of them within backward.
        """
        assert not self._shards
        assert not self._wholes
        assert not self._factors
        self._valid_B = valid_B
        loss_B.sum().backward()
        for name, parameter in self.clipped_sum.parameters.items():
            assert parameter.grad is None, f"{name} had a gradient that mixes samples"
        self._gather()
        if self._early is None:
            shards = [self._shards.pop(name).flatten(2) for name in self._layouts]
            return self.clipped_sum.add(shards, valid_B)
        for group in self._early.finish():
            self._add_group(group)
        clips, self._clips = self._clips, []
        return Clip(*map(torch.cat, zip(*clips, strict=True))).over_groups()

    def form_grad_samples(self, name: str, batch_size: int, write: Write) -> None:
        """Write a layer's per-sample gradients within backward, and start their sum over cp."""
        self.add(name, self.form(name, batch_size, write))

    def keeps_outputs(self, name: str, tokens: int) -> bool:
        return False

    def form(self, name: str, batch_size: int, write: Write) -> Formed:
        """Write a layer's per-sample gradients and start their sum over cp, without adding them.

        Matrices are reduced at once, while the next is written: two at a time are held whole.
        Vectors (norm weights) are small: they wait for each other.
        """
        layout = self._layouts[name]
        if not self._shard or len(layout.shape) == 1:
            whole = layout.allocate(batch_size, self._device)
            write(layout, whole, slice(0, batch_size))
            return Formed(None, whole)
        one_by_one = 4 * layout.shape.numel() * batch_size > self._transient_bytes
        at_once = 1 if one_by_one else batch_size
        if self._cp is None:
            shard = layout.allocate(batch_size, self._device)[0]
        else:
            shape = (batch_size, layout.dp_shard, layout.rows, *layout.shape[1:])
            shard = torch.empty(shape, dtype=torch.float32, device=self._device)
        for start in range(0, batch_size, at_once):
            samples = slice(start, start + at_once)
            if self._cp is None:
                write(layout, shard[None, samples], samples)
                continue
            self._wait(1)  # it goes on beside what is written now
            whole = layout.allocate(at_once, self._device)
            write(layout, whole, samples)
            work = reduce_scatter_sum(shard[samples], whole, self._cp, async_op=True)
            assert work is not None
            self._in_flight.append(_Running(work, name, whole))
        return Formed(shard, None)

    def add(self, name: str, formed: Formed, factor_B: torch.Tensor | None = None) -> None:
        """Add a layer's per-sample gradients to the microbatch's.

        Args:
            factor_B: fp32 factor of each sample; None for 1.
        """
        batch_size = formed.batch_size
        samples = len(self._valid_B)
        assert batch_size == samples, f"{name}: dim 0 of its layer's input is not the sample"
        if formed.whole is not None:
            if factor_B is not None:
                formed.whole.mul_(_along(factor_B, formed.whole, dim=1))
            add_to(self._wholes, name, formed.whole)
            return
        assert formed.shard is not None
        if name not in self._shards and factor_B is not None:
            self._factors[name] = factor_B  # multiplied when its sum is done: nothing waits here
        elif name in self._shards:
            assert factor_B is None, f"{name}: only the first of its layers may have a factor"
            self._settle(name)
        add_to(self._shards, name, formed.shard)
        if self._early is not None:
            for group in self._early.take(name):
                self._add_group(group)

    def _add_group(self, group: int) -> None:
        """Clip and add a group of parameters, all of whose layers have formed their gradients.

        Sums of other layers keep running.
        """
        names = self.clipped_sum.policy.members[group]
        while any(running.name in names for running in self._in_flight):
            self._in_flight.popleft().work.wait()
        for name in names:
            self._settle(name)
        parts = {name: self._shards.pop(name).flatten(2) for name in names}
        self._clips.append(self.clipped_sum.add_group(group, parts, self._valid_B))

    def held(self) -> list[torch.Tensor]:
        """List the per-sample gradients that this backward has formed so far."""
        return [*self._shards.values(), *self._wholes.values()]

    def _gather(self) -> None:
        """Finish the sums over cp, so that `_shards` has all gradients that are not added yet."""
        self._wait()
        for name in list(self._factors):
            self._settle(name)
        if self._shard:
            self._shards |= sum_together_over_cp(self._wholes, self._cp)
            self._wholes.clear()
        else:
            self._reduce_wholes_alone()
        added = self._early.added if self._early is not None else set()
        unused = self._layouts.keys() - self._shards.keys() - added
        assert not unused, f"trainable but had no gradient: {sorted(unused)}"

    def _reduce_wholes_alone(self) -> None:
        """Sum whole gradients over cp, an all-reduce per parameter, and keep this rank's part."""
        for name, whole in self._wholes.items():
            if self._cp is not None:
                dist.all_reduce(whole, group=self._cp)
            self._shards[name] = whole[self._cp_rank]
        self._wholes.clear()

    def _settle(self, name: str) -> None:
        """Wait for a matrix's sum and apply its pending factor, if there is one."""
        factor_B = self._factors.pop(name, None)
        if factor_B is not None:
            self._wait()
            self._shards[name].mul_(_along(factor_B, self._shards[name], dim=0))

    def _wait(self, running: int = 0) -> None:
        """Wait until at most `running` sums are running."""
        while len(self._in_flight) > running:
            self._in_flight.popleft().work.wait()


class _Running(NamedTuple):
    """A running sum over cp."""

    work: dist.Work
    name: str
    whole: torch.Tensor  # its input, kept alive


class _WholeGroups:
    """The clip groups whose gradients are complete, while backward continues.

    A group with a vector completes at the end: vectors wait for each other.
    """

    def __init__(self, model: nn.Module, clipped_sum: ClippedSum) -> None:
        self._members = clipped_sum.policy.members
        self._group = clipped_sum.policy.group_of()
        layers = layers_of_each_parameter(model)
        self._layers = [sum(layers[name] for name in names) for names in self._members]
        self._start()

    def _start(self) -> None:
        self._formed: Counter[int] = Counter()  # layers, by group
        self._whole: list[int] = []
        self._taken: list[int] = []

    @property
    def added(self) -> set[str]:
        """The parameters of groups that were taken."""
        return {name for group in self._taken for name in self._members[group]}

    def take(self, name: str) -> list[int]:
        """Count one more layer's gradients of `name`, and return the groups that were complete
        before: this layer's sum over cp has only just begun.
        """
        before, self._whole = self._whole, []
        group = self._group[name]
        self._formed[group] += 1
        if self._formed[group] == self._layers[group]:
            self._whole = [group]
        self._taken += before
        return before

    def finish(self) -> list[int]:
        """Return the groups that were not taken, and start again."""
        left = [group for group in range(len(self._members)) if group not in self._taken]
        self._start()
        return left


def _along(factor_B: torch.Tensor, gradients: torch.Tensor, dim: int) -> torch.Tensor:
    """View `factor_B` so that it multiplies the samples, which are dimension `dim`."""
    shape = [1] * gradients.dim()
    shape[dim] = len(factor_B)
    return factor_B.view(shape)
