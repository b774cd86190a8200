"""Whole steps against the plain loop: clipped sums, noise, updates, and a checkpoint of one."""

import copy
import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.train import Trainer

from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.models.parameters import canonical_name, local_part
from torchtitan_dp.optimizer import MomentumSGD
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.privacy.secure_noise import add_secure_gaussian_noise_
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
from torchtitan_dp.selfcheck.run import DEVIATIONS, Measured, Ranks, worst
from torchtitan_dp.selfcheck.small import Small, Terms, whole
from torchtitan_dp.train_spec import build_optimizers

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

    def __init__(self, keep: int = 1) -> None:
        self._known: dict[str, Reference] = {}
        self._keep = keep  # so many results, each as large as the model

    def over(self, terms: Terms) -> Reference:
        """Return the samples for some terms, and the loop's results on them."""
        privacy = terms.config.privacy
        how = privacy.clipping, privacy.clipping_groups, privacy.clip_function
        key = repr((terms.args, terms.samples, *how))
        if key not in self._known:
            samples = make_samples(terms.args, terms.samples)
            loop = reference_model(terms.args).double(), *samples
            # Twice, because the gradients of all samples together are many times the model.
            norms = [norm(gradient) for gradient in reference_gradients(*loop)]
            C = 1.5 * norms[0]
            group_of = group_names(privacy.clipping, privacy.clipping_groups)
            total = reference_sum(reference_gradients(*loop), C, group_of, privacy.clip_function)
            for old in [*self._known][: len(self._known) + 1 - self._keep]:
                del self._known[old]
            self._known[key] = Reference(samples, norms, C, total)
        return self._known[key]


def clipped_sum(ranks: Ranks, terms: Terms, loops: Loops) -> Sequence[Measured]:
    """Compare the sum of clipped gradients, and their norms, with the loop's."""
    reference = loops.over(terms)
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    total, norms = small.clipped_sum(*reference.samples)
    off = [_norm_error(found, reference.norms[sample]) for sample, found in norms.items()]
    bound = rounding(terms.dtype)
    return (
        Measured("the sum", relative_error(total, reference.total), bound + _SAFETY),
        Measured("the norms", worst(off), bound),
    )


def _norm_error(found: float, true: float) -> float:
    """Return a norm's relative error; where the loss is NaN, 1 if the norm is finite."""
    if math.isnan(true):
        return float(math.isfinite(found))
    return abs(found - true) / true if true else found


class Trained(Small):
    """A small model that the run's optimizer updates."""

    def __init__(self, terms: Terms, device: torch.device, *, max_grad_norm: float) -> None:
        super().__init__(terms, device, max_grad_norm=max_grad_norm)
        self.optimizers = build_optimizers([self.model], terms.config.optimizer, self.dims)

    def update(self, *, sigma: float, batch: float, key: bytes) -> Gradient:
        """Add noise of sigma C to the sum, divide it by `batch`, and step the optimizer.

        Returns:
            The whole gradient that the optimizer got, by name, on the CPU.
        """
        handed: Gradient = {}

        def record(*_: object) -> None:
            for name, parameter in self.parameters.items():
                assert parameter.grad is not None, name
                handed[name] = whole(parameter.grad)

        hook = next(iter(self.optimizers)).register_step_pre_hook(record)
        optimizer = self.step.optimizer(
            self.optimizers, noise_multiplier=sigma, expected_batch_size=batch
        )
        optimizer.step(self.step.clipped_sum.take(), [(key, 1.0)])
        self.step.clipped_sum.reset()
        hook.remove()
        return handed

    def noise(self, name: str, *, sigma: float, batch: float, key: bytes) -> Tensor:
        """Draw one parameter's noise as a single rank with all of it would; to the CPU."""
        shape, std = self.parameters[name].shape, sigma * self.step.max_grad_norm
        noise = torch.zeros(shape.numel(), device=self.device)
        add = add_secure_gaussian_noise_ if self.step.secure_noise else add_gaussian_noise_
        add(noise, std=std, key=key, name=name, start=0)
        return noise.div_(batch).view(shape).cpu()

    def weights(self) -> Gradient:
        """Copy all whole weights to the CPU. Collective: an all-gather over dp_shard x cp."""
        return {canonical_name(n): whole(p) for n, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's shards of the weights and of the optimizer's state, by name."""
        found = {name: local_part(p.detach()) for name, p in self.parameters.items()}
        names = {parameter: name for name, parameter in self.parameters.items()}
        for inner in self.optimizers:
            for parameter, state in inner.state.items():
                for key, value in state.items():
                    found[f"{names[parameter]}/{key}"] = local_part(value)
        return found


def noise(ranks: Ranks, terms: Terms) -> Sequence[Measured]:
    """Measure two steps of noise alone: moments, tails, repeats, and its values on other meshes."""
    C, sigma, batch = 0.5, 1.5, 4.0
    trained = Trained(terms, ranks.device, max_grad_norm=C)
    keys = RootKey.from_debug_seed(2).stream("noise")
    differ, values = 0, []
    for step in range(2):
        key = keys.take(step)
        for name, drawn in trained.update(sigma=sigma, batch=batch, key=key).items():
            alone = trained.noise(name, sigma=sigma, batch=batch, key=key)
            differ += int((drawn != alone).sum())
            values.append(drawn.flatten())
    z = torch.cat(values).double() / (sigma * C / batch)
    moments = [_off(z**k, mean, var) for k, mean, var in _MOMENTS]
    beyond = {edge: math.erfc(edge / 2**0.5) for edge in (1.0, 2.0, 3.0, 4.0)}
    tails = [_off((z.abs() > edge).double(), p, p * (1 - p)) for edge, p in beyond.items()]
    return (
        Measured("moments", worst(moments), DEVIATIONS),
        Measured("tails", worst(tails), DEVIATIONS),
        Measured("repeated stretches", _repeats(torch.cat(values)), 0),
        Measured("values that differ from another mesh", differ, 0),
    )


# Powers of N(0, 1): the exponent, the mean, and the variance that its deviation is measured in.
_MOMENTS = ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0))


def _off(values: Tensor, mean: float, variance: float) -> float:
    """Return how far the mean of independent values is from `mean`, in its standard deviations."""
    return abs(values.mean().item() - mean) / (variance / values.numel()) ** 0.5


def _repeats(values: Tensor) -> int:
    """Count the runs of 4 consecutive fp32 values that occur elsewhere too.

    By a 64-bit hash: two of a million that differ have the same with probability 3e-8.
    """
    runs = values.view(torch.int32).long().unfold(0, 4, 1)
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
    signed = [number - 2**64 if number >= 2**63 else number for number in odd]
    mixed = (runs * torch.tensor(signed, device=values.device)).sum(1)
    return len(mixed) - len(torch.unique(mixed))


def updates(ranks: Ranks, terms: Terms, loops: Loops) -> Sequence[Measured]:
    """Compare noisy steps with the loop's: the optimizer's gradients, and the new weights.

    The noise is as large as the sum, so that a fault of either shows.
    """
    reference, batch = loops.over(terms), 5  # the divisor is no number of samples here
    trained = Trained(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    stream = RootKey.from_debug_seed(1).stream("noise")
    keys = [stream.take(step) for step in range(3)]
    sigma = sum(g.numel() for g in reference.total.values()) ** -0.5
    before, handed = trained.weights(), []
    for key in keys:
        trained.accumulate(*reference.samples)
        handed.append(trained.update(sigma=sigma, batch=batch, key=key))
    expected: Gradient = {}  # of the first step: later ones begin with other weights
    for name, total in reference.total.items():
        drawn = trained.noise(name, sigma=sigma, batch=batch, key=keys[0])
        expected[name] = total / batch + drawn.double()
    noise_std = sigma * trained.step.max_grad_norm / batch
    weights, by_hand = trained.weights(), _stepped(before, handed, terms, noise_std)
    moved = {name: weights[name].double() - before[name].double() for name in expected}
    should = {name: by_hand[name] - before[name].double() for name in expected}
    content = b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))
    hashes = ranks.gather(hashlib.sha256(content).hexdigest())
    frozen = weights.keys() - expected.keys()
    changed = sum(not torch.equal(weights[name], before[name]) for name in frozen)
    return (
        Measured("sum + noise", relative_error(handed[0], expected), 1e-5 + _SAFETY),
        # The weights are rounded to fp32: 6e-8 of 1, over a change of 1e-2.
        Measured("updated weights", relative_error(moved, should), 1e-4),
        Measured("ranks whose weights differ", sum(h != hashes[0] for h in hashes), 0),
        Measured("frozen weights that changed", changed, 0),
    )


def _stepped(
    weights: Gradient, gradients: list[Gradient], terms: Terms, noise_std: float
) -> Gradient:
    """Take the optimizer's steps in fp64 on the CPU."""
    config = terms.config.optimizer
    by_hand = {name: weights[name].double().requires_grad_() for name in gradients[0]}
    options: dict[str, Any] = {"eps": config.eps}
    make: Callable[..., torch.optim.Optimizer]
    if config.name == MomentumSGD.__name__:
        make, options = MomentumSGD, {"noise_std": noise_std}
    else:
        make = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[config.name]
    options |= {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    optimizer = make(by_hand.values(), weight_decay=config.weight_decay, **options)
    for gradient in gradients:
        for name, weight in by_hand.items():
            weight.grad = gradient[name].double()
        optimizer.step()
    return {name: weight.detach() for name, weight in by_hand.items()}


def checkpoint(ranks: Ranks, terms: Terms, place: str) -> Sequence[Measured]:
    """Save weights and optimizer state in `place`, overwrite and load them; count what differs."""
    trained = Trained(terms, ranks.device, max_grad_norm=1.0)
    trained.accumulate(*make_samples(terms.args, terms.samples))
    trained.update(sigma=1.0, batch=1.0, key=RootKey.from_debug_seed(3).stream("noise").take(1))
    kept = {name: tensor.clone() for name, tensor in trained.state().items()}
    made = tempfile.mkdtemp(prefix="selfcheck-", dir=place) if ranks.rank == 0 else ""
    folder = ranks.gather(made)[0]
    try:
        run = _Run(trained, folder, step=2)
        checkpointer = Checkpointer(cast(Trainer, run), Start(), "selfcheck")
        checkpointer.save(run.step)
        with torch.no_grad():
            for tensor in trained.state().values():
                tensor.fill_(-1)
        run.step = 0
        checkpointer.load()
        checkpointer.close()
        ranks.gather(None)  # all have read it
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    loaded = trained.state()
    lost = sum(not torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    return (Measured("tensors that changed", lost + (run.step != 2), 0),)


class _Run:
    """The part of a trainer that the checkpointer needs, with a step in place of its state."""

    def __init__(self, trained: Trained, folder: str, step: int) -> None:
        self.step = step
        self.job_config = config = copy.deepcopy(trained.terms.config)
        config.job.dump_folder = folder
        saving = config.checkpoint
        saving.enable, saving.interval, saving.keep_latest_k = True, 1, 0
        saving.load_only = saving.initial_load_in_hf = saving.last_save_in_hf = False
        saving.initial_load_path, saving.async_mode = None, "disabled"
        self.checkpointer = SimpleNamespace(close=lambda: None, enable=False)
        self.dataloader = SimpleNamespace(
            state_dict=lambda: {"step": step}, load_state_dict=lambda _: None
        )
        self.model_parts, self.optimizers = [trained.model], trained.optimizers
        self.lr_schedulers = build_lr_schedulers(
            trained.optimizers, config.lr_scheduler, config.training.steps
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
