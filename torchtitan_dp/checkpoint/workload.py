"""The share of each step's noise in the weights that a run exports, or saves: its workload.

It follows from public settings: the steps, the schedule of learning rates, the momentum, the decay
of weights, and the average of weights where that is exported.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchtitan_dp.config import JobConfig

COUPLED = "Adam"  # adds the decay to the gradient: a share of it that depends on gradients
MOST_CHECKPOINTS = 32  # whose noise is summed


def shares_of_steps(config: JobConfig) -> tuple[tuple[float, ...], ...]:
    """Return a_1, …, a_n: by how much noise in the gradient of step t moves the exported weights,
    relative to other steps. For `privacy.bands_for = "checkpoints"` a row for each checkpoint, or
    for every k-th, so that they are at most `MOST_CHECKPOINTS` and one; the last is the run's end.
    """
    steps = max(config.training.steps, 1)
    apart = steps
    if config.privacy.bands_for == "checkpoints":
        apart = config.checkpoint.interval
        apart *= -(-steps // (apart * MOST_CHECKPOINTS))
    ends, factor = [*range(apart, steps, apart), steps], schedule(config)
    shares = np.zeros((len(ends), steps))
    for row, end in zip(shares, ends, strict=True):
        row[:end] = _shares_until(end, config, factor)
    shares /= np.abs(shares).max() or 1.0
    return tuple(map(tuple, shares.tolist()))


def _shares_until(end: int, config: JobConfig, factor: Callable[[int], float]) -> list[float]:
    """Return the shares of steps 1, …, `end` in the weights after them.

    Where β is the momentum, λ the weight decay and η_s the rate of step s, the optimizers
    (`optimizer.MomentumSGD`, AdamW) do

        m_s = β m_{s-1} + (1 - β) g_s        w_s = (1 - λ η_s) w_{s-1} - η_s m_s / (1 - β^s)

    but for a divisor, AdamW's root of the second moment, which is taken to be constant: with DP it
    is next to nothing but the size of a step's noise. The exported weights are Σ e_s w_s: the last
    ones, or the average of `models.ema`.
    """
    optimizer = config.optimizer
    beta = optimizer.beta1
    decay = 0.0 if optimizer.name == COUPLED else optimizer.weight_decay
    exported, after, moment = 1.0, 0.0, 0.0  # Π d_r of later averages; Σ e_s …; Σ β^… …
    next_rate, shares = 0.0, [0.0] * end
    for step in range(end, 0, -1):
        kept = min(config.ema.decay, step / (9 + step)) if config.ema.enable else 0.0
        rate = optimizer.lr * factor(step - 1)
        after = exported * (1 - kept) + (1 - decay * next_rate) * after
        exported, next_rate = exported * kept, rate
        moment = rate * after / (1 - beta**step) + beta * moment
        shares[step - 1] = moment
    return shares


def schedule(config: JobConfig) -> Callable[[int], float]:
    """Return TorchTitan's factor of the learning rate, by the number of steps before."""
    import torch

    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan.components.lr_scheduler import build_lr_schedulers

    settings, steps = config.lr_scheduler, config.training.steps
    total = max(settings.total_steps or steps, 1)
    warmup = min(settings.warmup_steps, total)  # as TorchTitan does, with a warning
    decays = settings.decay_ratio and min(settings.decay_ratio, 1 - warmup / total)
    settings = replace(settings, warmup_steps=warmup, total_steps=total, decay_ratio=decays)
    one = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedulers = build_lr_schedulers([one], settings, total)  # type: ignore[arg-type]
    (factor,) = schedulers.schedulers[0].lr_lambdas  # type: ignore[attr-defined]
    return factor  # type: ignore[no-any-return]
