"""Refuses settings by which steps spend epsilon and cannot change a weight (hazard row 69).

The learning rates are those of TorchTitan's own schedule. AdamW moves a value by about its learning
rate, and by less where `optimizer.eps` is above the gradients; adapters change the weights beside
them by alpha / rank of that. Weights of fp32 that are not next to zero keep no change below
`SMALLEST`.
"""

from torchtitan_dp.checkpoint.terms import schedule
from torchtitan_dp.config import JobConfig
from torchtitan_dp.optimizer import MomentumSGD

SMALLEST = 1e-12
_LOOKED_AT = 10_000  # steps, at most: schedules change slowly
_LAST = 0.01  # of the steps, which a decay to zero may leave without a change


def factors(config: JobConfig) -> dict[int, float]:
    """Return the schedule's factor of each step, or of many of them and the last."""
    steps = config.training.steps
    factor = schedule(config)
    looked_at = {*range(0, steps, max(1, steps // _LOOKED_AT)), steps - 1}
    return {index + 1: factor(index) for index in sorted(looked_at)}


def check_learning(config: JobConfig) -> None:
    """Refuse, by ValueError with the key, steps that cannot change a weight: all of a run with
    privacy, or its last ones."""
    if not config.privacy.enable:
        return
    optimizer, lora, steps = config.optimizer, config.lora, config.training.steps
    spends = "every step would spend epsilon, and none change a weight"
    scales = [("optimizer.lr", optimizer.lr, optimizer.lr, "raise it (1e-3, say)")]
    if optimizer.name != MomentumSGD.__name__ and optimizer.eps > config.privacy.max_grad_norm:
        part = config.privacy.max_grad_norm / optimizer.eps
        scales.append(("optimizer.eps", optimizer.eps, part, "lower it (1e-8, say)"))
    if lora.rank:
        part = lora.alpha / lora.rank
        scales.append(("lora.alpha", lora.alpha, part, "raise it (2 x rank, say)"))
    change = 1.0
    for key, value, part, remedy in scales:
        change *= part
        if change < SMALLEST:
            raise ValueError(f"{key} = {value:g}: {spends}; {remedy}")
    changing = [step for step, factor in factors(config).items() if factor * change >= SMALLEST]
    if not changing:
        warmup = config.lr_scheduler.warmup_steps
        raise ValueError(
            f"lr_scheduler.warmup_steps = {warmup}: {spends}, since training.steps = {steps} end "
            "before the learning rate has risen; lower it"
        )
    if steps - changing[-1] > max(1, _LAST * steps):
        raise ValueError(
            f"lr_scheduler.min_lr_factor = {config.lr_scheduler.min_lr_factor:g}: steps after "
            f"{changing[-1]} of {steps} would spend epsilon, and change no weight; raise it (0.1, "
            "say), or lower training.steps"
        )
