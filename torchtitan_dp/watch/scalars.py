"""Every scalar that a run logs, and whether it may be published.

Guarantee:
    A public scalar follows from the configuration, the number of steps and the ledger alone. All
    others depend on records without noise, if only by the time that a step took. A scalar that the
    table lacks is treated as one of those. In a run that is not private nothing is public.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

PUBLISHABLE, NOT_PRIVATE = "private_to_publish", "not_private"  # sections of TensorBoard


@dataclass(frozen=True)
class Scalar:
    """A scalar by its name below the section; `*` stands for any text."""

    name: str
    public: bool
    words: str


SCALARS = (
    Scalar("lr", True, "learning rate of the step"),
    Scalar("epsilon", True, "ε spent so far"),
    Scalar("epsilon_planned", True, "ε at the last planned step, with all steps lost to a crash"),
    Scalar("noise_multiplier", True, "σ: the noise's standard deviation over the clip norm"),
    Scalar("loss", False, "mean loss of the step's samples"),
    Scalar("realized_batch_size", False, "samples that were drawn"),
    Scalar("rejected", False, "drawn samples left out: their gradient or loss is not finite"),
    Scalar("clipped_fraction", False, "share of samples whose gradient was longer than the clip"),
    Scalar("norm_p10", False, "10th percentile of per-sample gradient norms, before clipping"),
    Scalar("norm_p50", False, "their median"),
    Scalar("norm_p90", False, "their 90th percentile"),
    Scalar("heldout_loss_noised", True, "mean clipped loss of held-out units, with noise"),
    Scalar("heldout_loss", False, "mean loss of held-out units"),
    Scalar("heldout_loss_at/*", False, "the same by position in the sample"),
    Scalar("heldout_loss_ema", False, "held-out loss of the averaged weights"),
    Scalar("heldout_loss_ema_at/*", False, "the same by position in the sample"),
    Scalar("throughput(tps)", False, "tokens a second and device, padding included"),
    Scalar("mfu(%)", False, "model FLOPs utilization, where the device's peak is known"),
    Scalar("memory/max_active(GiB)", False, "peak memory of live tensors (CPU: of the process)"),
    Scalar("memory/max_reserved(GiB)", False, "peak memory that PyTorch's allocator reserved"),
    Scalar("memory/reserved_over_active", False, "their ratio: fragmentation, where well above 1"),
)


def find(name: str) -> Scalar | None:
    """Find a scalar in the table."""
    return next((scalar for scalar in SCALARS if fnmatchcase(name, scalar.name)), None)


def is_public(name: str) -> bool:
    """Return whether a private run's scalar may be published; not if the table lacks it."""
    scalar = find(name)
    return scalar is not None and scalar.public


def tag(name: str, *, private: bool) -> str:
    """Return a scalar's tag, in its section.

    Args:
        private: whether the run is.
    """
    return f"{PUBLISHABLE if private and is_public(name) else NOT_PRIVATE}/{name}"
