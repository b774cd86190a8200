"""Clipped sums, updates and weights of whole steps against a plain loop over single samples."""

import hashlib
import math
from collections.abc import Sequence

import torch

from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.reference import (
    Reference,
    Samples,
    make_samples,
    reference_sum,
    relative_error,
    rounding,
)
from torchtitan_dp.selfcheck.result import Measured, worst
from torchtitan_dp.selfcheck.small import Small
from torchtitan_dp.selfcheck.terms import Terms

# `clip` aims at C (1 - 1e-5), so that rounding cannot exceed C.
_SAFETY = 1e-5
_BATCH = 5  # the divisor, which no number of samples here is
_STEPS = 3


class Loops:
    """Runs the plain loop, once for all methods that are held to the same one."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Samples, Reference]] = {}

    def over(self, terms: Terms) -> tuple[Samples, Reference]:
        """Return the samples of some terms, and what the loop finds on them."""
        (replicate, shard, _), privacy = terms.degrees, terms.config.privacy
        ranks = replicate * shard
        how = privacy.clipping, privacy.clipping_groups, privacy.clip_function
        key = repr((terms.args, ranks, *how))
        if key not in self._known:
            samples = make_samples(terms.args, ranks=ranks)
            found = samples, reference_sum(terms.args, samples, privacy)
            self._known = {key: found}  # one at a time: it is as large as the model
        return self._known[key]


def clipped_sum(ranks: Ranks, terms: Terms, loops: Loops) -> Sequence[Measured]:
    """Compare the sum of clipped gradients, and their norms, with the loop's."""
    samples, reference = loops.over(terms)
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    norms = small.accumulate(samples)
    total = small.update(sigma=0.0, batch=1.0, key=bytes(32))
    off = [_norm_error(norm, reference.norms[sample]) for sample, norm in norms.items()]
    bound = rounding(terms.dtype)
    return (
        Measured("the sum", relative_error(_on_cpu(total), reference.total), bound + _SAFETY),
        Measured("the norms", worst([0.0, *off]), bound),
    )


def updates(ranks: Ranks, terms: Terms, loops: Loops) -> Sequence[Measured]:
    """Compare noisy steps with the loop's: what AdamW is handed, and what it makes of the weights.

    The noise is as large as the sum, so that a fault of either shows.
    """
    samples, reference = loops.over(terms)
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    keys = RootKey.from_debug_seed(1).stream("noise")
    noise = {"sigma": reference.values**-0.5, "batch": _BATCH}
    before, frozen, handed = _on_cpu(small.weights()), small.frozen(), []
    expected: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        small.accumulate(samples)
        key = keys.take(step)
        handed.append(_on_cpu(small.update(**noise, key=key)))
        if step == 0:  # later steps have other weights
            for name, total in reference.total.items():
                drawn = small.noise(name, **noise, key=key).cpu().double()
                expected[name] = total / _BATCH + drawn
    weights = _on_cpu(small.weights())
    moved = {name: weights[name].double() - w.double() for name, w in before.items()}
    by_hand = _adamw(before, handed, small)
    should = {name: by_hand[name] - w.double() for name, w in before.items()}
    hashes = ranks.gather(_hash(weights))
    changed = sum(not torch.equal(w, frozen[name]) for name, w in small.frozen().items())
    return (
        Measured("sum + noise", relative_error(handed[0], expected), 1e-5 + _SAFETY),
        # The weights are rounded to fp32: 6e-8 of 1, over a change of 1e-2.
        Measured("AdamW's weights", relative_error(moved, should), 1e-4),
        Measured("ranks with other weights", sum(h != hashes[0] for h in hashes), 0),
        Measured("frozen weights that changed", sum(ranks.gather(changed)), 0),
    )


def _norm_error(norm: float, true: float) -> float:
    """Measure a norm's error, as a share; of a loss that is no number, whether the norm is one."""
    if math.isnan(true):
        return float(math.isfinite(norm))
    return abs(norm - true) / true if true else norm


def _adamw(
    weights: dict[str, torch.Tensor], gradients: list[dict[str, torch.Tensor]], small: Small
) -> dict[str, torch.Tensor]:
    """Take AdamW's steps in fp64 on the CPU."""
    settings = small.terms.config.optimizer
    by_hand = {name: w.double().requires_grad_() for name, w in weights.items()}
    make = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[settings.name]
    optimizer = make(
        by_hand.values(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for gradient in gradients:
        for name, weight in by_hand.items():
            weight.grad = gradient[name].double()
        optimizer.step()
    return {name: weight.detach() for name, weight in by_hand.items()}


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
