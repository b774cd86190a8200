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
    """Probability that the guarantee may fail: a tenth of 1 / number of units, or less.
    Required."""

    max_grad_norm: float = 1.0
    """C: the norm that each unit's gradient is clipped to."""

    accountant: Literal["rdp", "pld"] = "pld"
    """How epsilon is computed: `pld` (tight at any delta, pessimistic by construction),
    `rdp` (looser, quick; Opacus')."""

    initial_weights_public: bool = False
    """The weights that the run starts from never saw private records. Needed where they come
    without a ledger of what they spent, and recorded as an assumption."""

    noise: Literal["independent", "banded"] = "independent"
    """`independent`: each step adds noise of its own. `banded` (BandMF): noise is correlated over
    steps, so that much of it cancels in the sum of updates, and units are in `bands` groups that
    take turns (docs/tuning.md)."""

    bands: int | Literal["auto"] = "auto"
    """For `banded`, b: a unit is drawn at every b-th step at most, with b times the rate. A rank
    keeps b - 1 fp32 values for each that it trains. `auto`: of 1, 2, 4, … rounds of groups in the
    run, the fewest within 10% of the least noise in the exported weights."""

    sampling: Literal["poisson", "allocation"] = "poisson"
    """`poisson`: each step draws every unit by a coin of its own. `allocation`: in each round of t
    = 1 / q steps, rounded, every unit takes part in exactly one step, chosen uniformly; a run is
    saved, stopped and resumed at rounds' ends alone (docs/privacy.md)."""

    sample_rate: float | None = None
    """q: the public probability that a unit (by default a record) takes part in a step. By default
    `training.global_batch_size` / number of training units, which makes that number public."""

    secure_noise: bool = False
    """Resist attacks on the low bits of floating-point noise: four fp64 draws a value, rounded to a
    fixed grid, in about five times the time. Draws of units, windows and projections then come from
    a cryptographic generator, SHAKE-256."""

    clipping: Literal["flat", "per_layer", "per_block"] = "flat"
    """`flat`: one norm over the whole gradient. `per_layer` (DP-ZeRO): each of the M modules that
    hold parameters to C / sqrt(M); `per_block`: each transformer block as one. Epsilon is the same.
    A layer's gradients can then be freed within backward (`grad_sample`), at more noise beside the
    signal."""

    clip_function: Literal["vanilla", "automatic"] = "vanilla"
    """How a gradient g is scaled: `vanilla` by min(1, C / |g|), `automatic` (Bu et al. 2023) by
    C / (|g| + 0.01)."""

    gradient_method: Literal["auto", "microbatch", "grad_sample", "ghost", "randomized"] = "auto"
    """`microbatch`: each sample has a backward pass of its own. `grad_sample` (LongShield): one
    backward pass, in which every layer forms its samples' gradients. `ghost` (ZeRO-DP+): norms from
    each layer's inputs and outputs' gradients where that is cheaper. `randomized` (DP-SGD-RC):
    large layers' norms are estimated from `projections`. `auto`: `microbatch` if
    `training.local_batch_size` is 1, else `grad_sample`. docs/methods.md compares them."""

    ghost_passes: Literal["one", "two"] = "one"
    """For `ghost` and `randomized`: `one` backward pass, which keeps every layer's input and its
    output's gradient, or `two`, which keep none (fast gradient clipping); then
    `activation_checkpoint.selective_ac_option` cannot be `op`."""

    projections: int = 32
    """For `randomized`, from how many random projections (k, from 8 to 4,096) a layer's norm is
    estimated. More cost time and memory, and err less."""

    norm_estimator: Literal["hutchinson", "hutch++"] = "hutchinson"
    """For `randomized`: `hutchinson`, or `hutch++`, which errs less for three times the
    products."""

    underestimates: Literal["capped", "accounted"] = "capped"
    """For `randomized`, a layer's gradient that is longer than its estimate: `capped`, it is scaled
    down to the estimate, and epsilon is that of exact norms; `accounted` (DP-SGD-RC as published),
    it is added as it is, and epsilon counts the errors. The latter needs `accountant = "pld"` and
    `clipping = "flat"`."""

    shard_grad_samples: bool = True
    """For `grad_sample`: sum per-sample gradients over the context-parallel ranks during backward
    (LongShield V2). False keeps them whole (V1): to compare."""

    debug_seed: int | None = None
    """Derive the run's secrets from this number, so that it can be repeated. Such a run is NOT
    private, and its outputs say so for good."""
