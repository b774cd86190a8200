"""Ghost clipping: norms without per-sample gradients, which then exist one at a time to be added.

The parts of ZeRO-DP+ (LongShield, section 4.1): for each layer the cheaper of ghost norm and
per-sample gradient (`ExactNorms.is_cheaper`); and, as `passes`,

- "one", book-keeping (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small
  Cost"): layers' inputs and outputs' gradients, and per-sample gradients formed for their norms,
  are kept until the norms are known. Nothing is computed twice.
- "two", fast gradient clipping with ghost norms (Lee and Kifer 2021; Li et al. 2021; Opacus since
  1.5): nothing is kept; a second backward pass over the same graph computes them again.

Published methods multiply the factors into the outputs' gradients and sum in one product over all
samples' tokens. In 16 bits that rounds each of them, after its norm was taken, by a share of
sum_t |l_t| |r_t|, which can be far more than the gradient's own norm. Here each sample's gradient
of a layer is written in fp32 by its own product and multiplied there: the same FLOPs, and 20 bytes
of traffic for each sample and value. `randomized` is the same with `RandomizedNorms`.

Guarantee:
    - With `ExactNorms`, one sample moves the sum by at most C for any error of the ghost norms.
      Let n_l be the norm of the sample's gradient of parameter l as it was found, whose squares sum
      to n^2, and f the sample's factor, f n <= C (for each clip group). The sum gets
      f min(1, n_l / m_l) g_l, where g_l is the very fp32 tensor that is added, summed over cp, and
      m_l its measured norm: at most f n_l, over all parameters at most f n.
    - Rejected samples are left out by selection, and so is a part whose m_l is not finite though
      n_l was. Assumes what `grad_sample` does.
    - The same holds for capped estimates. With a finder whose `cap` is above 1, the sum gets
      f min(1, cap n_l / m_l) g_l: at most cap C in all, and at most C times the whole gradient's
      true norm over its estimate (`privacy.losses`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from torchtitan_dp.base.collectives import Pending
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import sum_all_over_cp, sum_over_cp
from torchtitan_dp.gradients.labels import label
from torchtitan_dp.gradients.layers import Formed, LayerGradients, layers_of_each_parameter
from torchtitan_dp.gradients.norms import ExactNorms, Factors
from torchtitan_dp.gradients.operands import Write, add_to
from torchtitan_dp.privacy.clipping import Clip, squared_norm

Passes = Literal["one", "two"]


@dataclass
class _Measuring:
    """What layers hand over in a first backward pass, until the microbatch's norms are known."""

    samples: int
    calls: Counter[str] = field(default_factory=Counter)  # of `form_grad_samples`, by parameter
    writes: dict[str, list[Write]] = field(default_factory=dict)  # whose norms are to be found
    kept: dict[str, Tensor] = field(default_factory=dict)  # (B, dp_shard, chunk), summed over cp
    vectors: dict[str, Tensor] = field(default_factory=dict)  # (cp, B, dp_shard, rows), not summed
    squares: dict[str, Tensor] = field(default_factory=dict)  # fp64 (B,): this rank's part


@dataclass
class _Adding:
    """A microbatch whose norms are known, and whose gradients are added, each parameter's once."""

    samples: int
    calls: Counter[str]  # of `form_grad_samples`, which a second pass repeats
    squares: dict[str, Tensor]  # fp64 (B,), over cp
    clip: Clip  # of groups: (G, B)
    left: set[str]  # parameters that are not added yet
    writes: dict[str, list[Write]] = field(default_factory=dict)  # of a second pass


class GhostGradients(LayerGradients):
    """Ghost clipping of one microbatch at a time."""

    def __init__(
        self,
        model: nn.Module,
        clipped_sum: ClippedSum,
        *,
        passes: Passes,
        norms: ExactNorms | None = None,
    ) -> None:
        """Measure by `norms`, exact by default, in `passes` backward passes a microbatch."""
        super().__init__(model, clipped_sum)
        self._cp_size = clipped_sum.groups.cp_size
        self._passes = passes
        self.norms = norms or ExactNorms(self._cp)
        self._layers = layers_of_each_parameter(model)
        self._group = clipped_sum.policy.group_of()
        self._phase: _Measuring | _Adding = _Measuring(0)

    def start_step(self, key: bytes) -> None:
        self.norms.start_step(key)

    def accumulate_clipped(
        self, loss_B: Tensor, valid_B: Tensor, positions: Sequence[int] | None = None
    ) -> Clip:
        """Add a microbatch (`clipped_sum.GradientMethod`); estimates need `positions`.

        Collectives, over cp, beside those within backward: one all-reduce of the norms of all
        parameters.
        """
        self._phase = measuring = _Measuring(len(loss_B))
        self.norms.start_microbatch(positions)
        loss = loss_B.sum()
        loss.backward(retain_graph=self._passes == "two")
        self._phase = adding = self._clip_by_norms(measuring, valid_B)
        while measuring.kept:
            name, shard_BDN = measuring.kept.popitem()
            factor_B, rejected_B = self._of_group(name, adding.clip)
            self.clipped_sum.add_part(name, shard_BDN, factor_B, rejected_B)
            adding.left.remove(name)
        if self._passes == "two":
            measuring.writes.clear()
            loss.backward()
        else:
            for name in list(measuring.writes):
                self._add_capped(adding, name, measuring.writes.pop(name))
        self._require_no_sum()
        assert not adding.left, f"measured, and not found again: {sorted(adding.left)}"
        self._phase = _Measuring(0)
        return adding.clip.over_groups()

    # What layers call, from within backward (and the loss head from within forward).

    def keeps_outputs(self, name: str, tokens: int) -> bool:
        return self._passes == "two" or self._ghosts(name, tokens * self._layers[name])

    def form_grad_samples(self, name: str, batch_size: int, write: Write) -> None:
        """Keep, measure or add a layer's gradients, given by their operands."""
        phase = self._phase
        assert batch_size == phase.samples, f"{name}: dim 0 of its layer's input is not the sample"
        if isinstance(phase, _Adding):
            if name in phase.left:
                phase.writes.setdefault(name, []).append(write)
                if len(phase.writes[name]) == phase.calls[name]:
                    self._add_capped(phase, name, phase.writes.pop(name))
            return
        assert name not in phase.squares, f"{name}: a layer is used twice; set ghost_passes = 'one'"
        phase.calls[name] += 1
        if len(self._layouts[name].shape) == 1:
            add_to(phase.vectors, name, self._write(name, [write], slice(0, batch_size)))
        elif self._passes == "two":
            phase.writes.setdefault(name, []).append(write)
            if len(phase.writes[name]) == self._layers[name]:
                self._measure(phase, name, phase.writes.pop(name))
        elif isinstance(write, Factors) and self._ghosts(name, _tokens(write) * self._layers[name]):
            phase.writes.setdefault(name, []).append(write)
        else:
            add_to(phase.kept, name, self._form(name, [write], batch_size))

    def form(self, name: str, batch_size: int, write: Write) -> Formed:
        """Write the loss head's gradients while it has the logits."""
        return Formed(batch_size, Pending(self._form(name, [write], batch_size)))

    def add(self, name: str, formed: Formed, factor_B: Tensor | None = None) -> None:
        """Keep formed gradients, each sample's multiplied by its factor."""
        assert formed.shard is not None
        assert isinstance(self._phase, _Measuring), "gradients are formed before"
        shard_BDN = formed.shard.wait()
        same = len(shard_BDN) == self._phase.samples
        assert same, f"{name}: dim 0 of its layer's input is not the sample"
        if factor_B is not None:
            shard_BDN.mul_(factor_B[:, None, None])
        add_to(self._phase.kept, name, shard_BDN)

    # Norms.

    def _ghosts(self, name: str, tokens: int) -> bool:
        """Return whether a norm from factors is cheaper, for `tokens` tokens on this rank."""
        return self.norms.is_cheaper(tokens * self._cp_size, self._layouts[name].shape)

    def _clip_by_norms(self, of: _Measuring, valid_B: Tensor) -> _Adding:
        """Find the remaining norms, sum squares over cp, and clip."""
        of.kept |= sum_all_over_cp(of.vectors, self._cp)
        of.vectors.clear()
        for name in of.kept.keys() & of.writes.keys():  # tied, and one layer's was formed
            add_to(of.kept, name, self._form(name, of.writes.pop(name), of.samples))
        for name, shard_BDN in of.kept.items():
            of.squares[name] = squared_norm(shard_BDN.flatten(1))
        for name in of.writes:
            self._measure(of, name, of.writes[name])
        unused = self._layouts.keys() - of.squares.keys()
        assert not unused, f"trainable but had no gradient: {sorted(unused)}"
        squares_LB = torch.stack([of.squares[name] for name in self._layouts])
        if self._cp is not None:
            dist.all_reduce(squares_LB, group=self._cp)
        squares_LB.clamp_(min=0)  # rounding can leave ghost norms below; NaN stays
        squares = dict(zip(self._layouts, squares_LB, strict=True))
        clip = self.clipped_sum.policy.clip(self.clipped_sum.by_group(squares), valid_B)
        return _Adding(of.samples, of.calls, squares, clip, set(self._layouts))

    def _of_group(self, name: str, clip: Clip) -> tuple[Tensor, Tensor]:
        """Return factors and rejections of a parameter's clip group."""
        group = self._group[name]
        return clip.factor_B[group], clip.rejected_B[group]

    def _measure(self, of: _Measuring, name: str, writes: Sequence[Write]) -> None:
        """Find one parameter's squared norms: this rank's part."""
        factors = [write for write in writes if isinstance(write, Factors)]
        tokens = sum(map(_tokens, factors))
        if len(factors) == len(writes) and self._ghosts(name, tokens):
            of.squares[name] = self.norms.squared_norms(name, self._layouts[name].shape, factors)
        else:
            slices = self._slices_of(name, of.samples)
            parts = [self._form_some(name, writes, some) for some in slices]
            of.squares[name] = torch.cat([squared_norm(part.flatten(1)) for part in parts])

    # Gradients.

    def _add_capped(self, to: _Adding, name: str, writes: Sequence[Write]) -> None:
        """Form a parameter's gradients and add them, each capped at `cap` times its found norm."""
        for samples in self._slices_of(name, to.samples):
            shard_BDN = self._form_some(name, writes, samples)
            formed_B = squared_norm(shard_BDN.flatten(1))
            if self._cp is not None:
                dist.all_reduce(formed_B, group=self._cp)
            found_B = self.norms.cap(name) ** 2 * to.squares[name][samples]
            cap_B = torch.where(formed_B > found_B, (found_B / formed_B).sqrt(), 1.0)
            factor_B, rejected_B = self._of_group(name, to.clip)
            factor_B = (factor_B[samples] * cap_B).float()
            # As in `clip`: a subnormal factor is rounded by more than `_SAFETY` leaves room for.
            subnormal_B = factor_B < torch.finfo(torch.float32).tiny
            rejected_B = rejected_B[samples] | ~torch.isfinite(formed_B) | subnormal_B
            self.clipped_sum.add_part(name, shard_BDN, factor_B, rejected_B)
        to.left.remove(name)

    def _form(self, name: str, writes: Sequence[Write], samples: int) -> Tensor:
        """Write all samples' gradients and sum them over cp: (B, dp_shard, chunk)."""
        parts = [self._form_some(name, writes, some) for some in self._slices_of(name, samples)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _form_some(self, name: str, writes: Sequence[Write], samples: slice) -> Tensor:
        """Write some samples' gradients and sum them over cp: (b, dp_shard, chunk)."""
        with label("per_sample_shards"):
            return sum_over_cp(self._write(name, writes, samples), self._cp).flatten(2)

    def _write(self, name: str, writes: Sequence[Write], samples: slice) -> Tensor:
        """Write gradients of this rank's tokens: (cp, b, dp_shard, rows, …)."""
        layout, total = self._layouts[name], dict[str, Tensor]()
        for write in writes:
            whole = layout.allocate(samples.stop - samples.start, self._device)
            write(layout, whole, samples)
            add_to(total, name, whole)
        return total[name]


def _tokens(factors: Factors) -> int:
    return factors.left.shape[1]
