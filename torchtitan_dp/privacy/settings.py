"""The section `[privacy]` of the configuration: a plain dataclass below all that reads it.

The docstring below each field is its reference, as in `config/__init__.py`.
"""

from dataclasses import dataclass
from typing import Literal

FEWEST, MOST = 8, 4096  # projections


@dataclass
class Privacy:
    """Differential privacy. The unit is one record, or what `data.unit_field` groups; the
    assumptions are in docs/privacy.md."""

    enable: bool = True
    """Train with differential privacy. False is plain TorchTitan on the same data."""

    target_epsilon: float | None = None
    """The epsilon to reach at the last step; the noise follows from it. This or
    `noise_multiplier`, not both."""

    noise_multiplier: float | None = None
    """sigma: the noise's standard deviation over `max_grad_norm`. 0 is allowed, and not private."""

    delta: float | None = None
    """Probability that the guarantee may fail: a tenth of 1 / number of units (records, or what
    `data.unit_field` groups), or less. Required."""

    max_grad_norm: float = 1.0
    """C: the norm that each unit's gradient is clipped to."""

    accountant: Literal["rdp", "pld"] = "pld"
    """How epsilon is computed: `pld` (tight at any delta, pessimistic by construction),
    `rdp` (looser, quick; Opacus')."""

    initial_weights_public: bool = False
    """The weights that the run starts from never saw private records. Needed where they come
    without a ledger of what they spent, and recorded as an assumption; where they have one, it
    counts whatever is said here."""

    noise: Literal["independent", "banded"] = "independent"
    """`independent`: each step adds noise of its own. `banded` (BandMF): noise is correlated over
    steps, so that much of it cancels in the sum of updates, and units are in `bands` groups that
    take turns; AdamW wants twice the learning rate or more (docs/tuning.md)."""

    bands: int | Literal["auto"] = "auto"
    """For `banded`, b: a unit is drawn at every b-th step at most, with b times the rate; at most
    1 / the sample rate. A rank keeps b - 1 fp32 values for each that it trains. `auto`: of 1, 2, 4,
    … rounds of groups in the run, the fewest within 10% of the least noise in the exported weights
    at `target_epsilon`, which the plan names."""

    bands_for: Literal["export", "checkpoints"] = "export"
    """The weights in which bands leave the least noise: `export`: those that the run ends with.
    `checkpoints`: those of all its checkpoints, by the mean square; for a run whose checkpoint is
    chosen later, or that may end early."""

    sampling: Literal["poisson", "allocation"] = "poisson"
    """`poisson`: each step draws every unit by a coin of its own. `allocation` (random allocation):
    in each round of t = 1 / q steps, rounded, every unit takes part in exactly one step, chosen
    uniformly and by itself. It needs less noise where units are seen a few times; ε is of whole
    rounds, and a run is saved, stopped and resumed at their ends alone (docs/privacy.md)."""

    sample_rate: float | None = None
    """q: the public probability that a unit (by default a record) takes part in a step. By default
    `training.global_batch_size` / number of training units, which makes that number public."""

    secure_noise: bool = False
    """Resist attacks on the low bits of floating-point noise: four fp64 draws a value, rounded to a
    fixed grid (`privacy/noise.py`). Drawing noise then takes about five times as long. Who
    is drawn, windows and projections then come from a cryptographic generator, SHAKE-256
    (`privacy/sampling.py`)."""

    clipping: Literal["flat", "per_layer", "per_block"] = "flat"
    """`flat`: one norm over the whole gradient. `per_layer` (DP-ZeRO): each of the M modules that
    hold parameters by a norm of its own, to C / sqrt(M). `per_block`: the same, each transformer
    block as one. The same noise gives the same epsilon. A layer's gradients can be freed within
    backward (`grad_sample`), but small ones keep their size: the noise is as large as M layers at
    their bounds."""

    clip_function: Literal["vanilla", "automatic"] = "vanilla"
    """How a gradient g is scaled: `vanilla` by min(1, C / |g|), `automatic` (Bu et al. 2023) by
    C / (|g| + 0.01)."""

    gradient_method: Literal["auto", "microbatch", "grad_sample", "ghost", "randomized"] = "auto"
    """`microbatch`: each sample has a backward pass of its own, whose reduced gradient is the
    per-sample gradient. `grad_sample`: one backward pass for a microbatch, in which every layer
    forms its samples' gradients (LongShield). `ghost`: norms from each layer's inputs and outputs'
    gradients where that is the cheaper way, as short contexts have it, so that per-sample gradients
    exist one layer at a time (ZeRO-DP+). `auto`: `microbatch` if `training.local_batch_size` is 1,
    else `grad_sample`. `randomized` (DP-SGD-RC): as `ghost`, but the norms of large layers are
    estimated from `projections`, without T^2 products, also across context-parallel ranks;
    `underestimates` says what becomes of the estimates' errors."""

    ghost_passes: Literal["one", "two"] = "one"
    """For `ghost` and `randomized`, backward passes over a microbatch. `one` keeps every layer's
    input and its output's gradient, also of layers that are checkpointed, and of the output layer
    for all tokens at once (book-keeping). `two` keeps none and finds them in a second pass (fast
    gradient clipping); then `activation_checkpoint.selective_ac_option` cannot be `op`."""

    projections: int = 32
    """For `randomized`, from how many random projections (k, from 8 to 4,096) a layer's norm is
    estimated. More cost time and memory, and err less."""

    underestimates: Literal["capped", "accounted"] = "capped"
    """For `randomized`, what becomes of a layer's gradient that is longer than its estimate.
    `capped`: it is scaled down to the estimate when it is added, so that a unit counts at most C,
    and epsilon is that of exact norms. `accounted` (DP-SGD-RC as published): it is added as it is,
    up to a bound (2.13 times the estimate, for 32 projections), and epsilon counts the errors: the
    same noise gives a larger one. Needs `accountant = "pld"` and `clipping = "flat"`."""

    shard_grad_samples: bool = True
    """For `grad_sample`: sum per-sample gradients over the context-parallel ranks during backward,
    so that each rank keeps its share (LongShield V2). False keeps them whole (V1): to compare."""

    debug_seed: int | None = None
    """Derive the run's secrets from this number, so that it can be repeated. Such a run is NOT
    private, and its outputs say so for good."""


def unit_word(unit_field: str | None) -> str:
    """Return the word for the privacy unit, which is drawn, clipped and protected."""
    return "record" if unit_field is None else "unit"
