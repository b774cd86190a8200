"""Whole steps against the plain loop: clipped sums and noisy updates. And a checkpoint of one."""

import copy
import hashlib
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.train import Trainer

from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.models.parameters import local_part
from torchtitan_dp.optimizer import MomentumSGD
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.selfcheck.reference import (
    Gradient,
    Samples,
    group_names,
    make_samples,
    norm,
    reference_gradients,
    reference_model,
    reference_sum,
    relative_error,
    rounding,
)
from torchtitan_dp.selfcheck.run import Measured, Ranks, worst
from torchtitan_dp.selfcheck.small import Small, Terms

# `clip` aims at C (1 - 1e-5), so that rounding cannot exceed C.
_SAFETY = 1e-5


@dataclass(frozen=True)
class Reference:
    """Made-up samples and the plain loop's results on them, in fp64 on the CPU."""

    samples: Samples
    norms: list[float]  # of each sample's whole gradient; NaN where its loss is
    max_grad_norm: float  # C, such that some samples are clipped and some are not
    total: Gradient  # the clipped sum


class Loops:
    """The plain loop's last results, shared by all methods that must agree with it."""

    def __init__(self) -> None:
        self._known: dict[str, Reference] = {}

    def over(self, terms: Terms) -> Reference:
        """Return the samples for some terms, and the loop's results on them."""
        (replicate, shard, _), privacy = terms.degrees, terms.config.privacy
        how = privacy.clipping, privacy.clipping_groups, privacy.clip_function
        key = repr((terms.args, replicate * shard, *how))
        if key not in self._known:
            samples = make_samples(terms.args, ranks=replicate * shard)
            model = reference_model(terms.args).double()
            loop = model, samples.tokens_NT, samples.labels_NT, samples.weight_N
            # Twice, because the gradients of all samples together are many times the model.
            norms = [norm(gradient) for gradient in reference_gradients(*loop)]
            C = 1.5 * norms[0]
            group_of = group_names(privacy.clipping, privacy.clipping_groups)
            total = reference_sum(reference_gradients(*loop), C, group_of, privacy.clip_function)
            self._known = {key: Reference(samples, norms, C, total)}  # as large as the model
        return self._known[key]


def clipped_sum(ranks: Ranks, terms: Terms, loops: Loops) -> Sequence[Measured]:
    """Compare the sum of clipped gradients, and their norms, with the loop's."""
    reference = loops.over(terms)
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    norms = small.accumulate(reference.samples)
    total = small.update(sigma=0.0, batch=1.0, key=bytes(32))
    off = [_norm_error(found, reference.norms[sample]) for sample, found in norms.items()]
    bound = rounding(terms.dtype)
    return (
        Measured("the sum", relative_error(total, reference.total), bound + _SAFETY),
        Measured("the norms", worst([0.0, *off]), bound),
    )


def _norm_error(found: float, true: float) -> float:
    """Return a norm's relative error; where the loss is NaN, 1 if the norm is finite."""
    if math.isnan(true):
        return float(math.isfinite(found))
    return abs(found - true) / true if true else found


def updates(ranks: Ranks, terms: Terms, loops: Loops) -> Sequence[Measured]:
    """Compare noisy steps with the loop's: the optimizer's gradients, and the new weights.

    The noise is as large as the sum, so that a fault of either shows.
    """
    reference, batch = loops.over(terms), 5  # the divisor is no number of samples here
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    stream = RootKey.from_debug_seed(1).stream("noise")
    keys = [stream.take(step) for step in range(3)]
    sigma = sum(g.numel() for g in reference.total.values()) ** -0.5
    before, frozen, handed = small.weights(), small.frozen(), []
    for key in keys:
        small.accumulate(reference.samples)
        handed.append(small.update(sigma=sigma, batch=batch, key=key))
    expected: Gradient = {}  # of the first step: later ones begin with other weights
    for name, total in reference.total.items():
        drawn = small.noise(name, sigma=sigma, batch=batch, key=keys[0])
        expected[name] = total / batch + drawn.double()
    noise_std = sigma * small.step.max_grad_norm / batch
    weights, by_hand = small.weights(), _stepped(before, handed, small, noise_std)
    moved = {name: weights[name].double() - w.double() for name, w in before.items()}
    should = {name: by_hand[name] - w.double() for name, w in before.items()}
    content = b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))
    hashes = ranks.gather(hashlib.sha256(content).hexdigest())
    changed = sum(not torch.equal(w, frozen[name]) for name, w in small.frozen().items())
    return (
        Measured("sum + noise", relative_error(handed[0], expected), 1e-5 + _SAFETY),
        # The weights are rounded to fp32: 6e-8 of 1, over a change of 1e-2.
        Measured("updated weights", relative_error(moved, should), 1e-4),
        Measured("ranks whose weights differ", sum(h != hashes[0] for h in hashes), 0),
        Measured("frozen weights that changed", sum(ranks.gather(changed)), 0),
    )


def _stepped(
    weights: Gradient, gradients: list[Gradient], small: Small, noise_std: float
) -> Gradient:
    """Take the optimizer's steps in fp64 on the CPU."""
    config = small.terms.config.optimizer
    by_hand = {name: w.double().requires_grad_() for name, w in weights.items()}
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    optimizer: torch.optim.Optimizer
    if config.name == MomentumSGD.__name__:
        optimizer = MomentumSGD(
            by_hand.values(), lr=config.lr, betas=betas, weight_decay=decay, noise_std=noise_std
        )
    else:
        make = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[config.name]
        optimizer = make(
            by_hand.values(), lr=config.lr, betas=betas, eps=config.eps, weight_decay=decay
        )
    for gradient in gradients:
        for name, weight in by_hand.items():
            weight.grad = gradient[name].double()
        optimizer.step()
    return {name: weight.detach() for name, weight in by_hand.items()}


def checkpoint(ranks: Ranks, terms: Terms, place: str) -> Sequence[Measured]:
    """Save weights and optimizer state, overwrite and load them; count the tensors that differ.

    Args:
        place: a folder that all ranks see, in which a temporary one is made.
    """
    small = Small(terms, ranks.device, max_grad_norm=1.0)
    replicate, shard, _ = terms.degrees
    small.accumulate(make_samples(terms.args, ranks=replicate * shard))
    small.update(sigma=1.0, batch=1.0, key=RootKey.from_debug_seed(3).stream("noise").take(1))
    kept = {name: tensor.clone() for name, tensor in _state(small).items()}
    made = tempfile.mkdtemp(prefix="selfcheck-", dir=place) if ranks.rank == 0 else ""
    folder = ranks.gather(made)[0]
    try:
        run = _Run(small, folder, step=2)
        checkpointer = Checkpointer(cast(Trainer, run), Start(), "selfcheck")
        checkpointer.save(run.step)
        with torch.no_grad():
            for tensor in _state(small).values():
                tensor.fill_(-1)
        run.step = 0
        checkpointer.load()
        checkpointer.close()
        ranks.gather(None)  # all have read it
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    loaded = _state(small)
    lost = sum(not torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    lost += run.step != 2
    return (Measured("tensors that changed", lost, 0),)


def _state(small: Small) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the weights and of the optimizer's state, by name."""
    found = {name: local_part(parameter.detach()) for name, parameter in small.parameters.items()}
    names = {parameter: name for name, parameter in small.parameters.items()}
    for inner in small.optimizers.optimizers:
        for parameter, state in inner.state.items():
            for key, value in state.items():
                found[f"{names[parameter]}/{key}"] = local_part(value)
    return found


class _Run:
    """The part of a trainer that the checkpointer needs, with a step in place of its state."""

    def __init__(self, small: Small, folder: str, step: int) -> None:
        self.step = step
        config = copy.deepcopy(small.terms.config)
        config.job.dump_folder = folder
        saving = config.checkpoint
        saving.enable, saving.interval, saving.keep_latest_k = True, 1, 0
        saving.load_only = saving.initial_load_in_hf = saving.last_save_in_hf = False
        saving.initial_load_path, saving.async_mode = None, "disabled"
        self.job_config = config
        self.checkpointer = SimpleNamespace(close=lambda: None, enable=False)
        self.dataloader = SimpleNamespace(
            state_dict=lambda: {"step": step}, load_state_dict=lambda _: None
        )
        self.model_parts, self.optimizers = [small.model], small.optimizers
        self.lr_schedulers = build_lr_schedulers(
            small.optimizers, config.lr_scheduler, config.training.steps
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
