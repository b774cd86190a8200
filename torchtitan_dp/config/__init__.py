"""The configuration of a run: the sections that this project adds to TorchTitan's.

The docstring below each field is its reference; `scripts/reference.py` puts them into the
documents. `JobConfig` is merged into TorchTitan's, so a section here needs only the fields that are
new or whose default differs.

`load` reads a TOML and the command line, by the `keys` of the schema, and keeps a run's
configuration in its folder; `supported` and `checks` refuse settings; `derived` are facts that
follow from them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torchtitan_dp.privacy.settings import Privacy as Privacy

ALL_LINEAR = "all-linear"
"""Of `lora.targets`: every linear layer of the blocks, in PEFT's words."""

if TYPE_CHECKING:
    from torchtitan.config import job_config as theirs

    Degree = int  # once `load_config` has resolved it
else:  # At run time the sections are merged by name.
    Degree = int | Literal["auto"]

    class theirs:
        JobConfig = Training = Checkpoint = Model = ActivationCheckpoint = object
        Parallelism = Metrics = Validation = object


@dataclass
class Data:
    """How records become samples; `training.dataset` and `training.dataset_path` locate them."""

    text_field: str = "text"
    """The field of a row with the record's text."""

    prompt_field: str | None = None
    """The field of a row with a prompt, which the model reads before `text_field`. Only
    the latter, the answer, is learned: no token of the prompt is a target. The two are tokenized
    separately, with nothing between them."""

    messages_field: str | None = None
    """In place of `text_field`, the field of a row with a chat: a list of `{"role": ...,
    "content": ...}` with two texts. The tokenizer's own chat template formats it, and only the
    turns of the role `assistant` are targets: the template's `{% generation %}` blocks, else the
    text that it adds for such a turn. Other fields of a message are not read."""

    unit_field: str | None = None
    """The owner of a record: a patient, user or repository, whose records together are then the
    unit that is drawn, clipped and protected, with one sample. A field with a string or a
    whole number; for `text` only `folder`, the first folder below `training.dataset_path`. A row
    without it, or a file in no folder, is a unit of its own that contributes nothing. Unset:
    every record is a unit."""

    unit_sampling: Literal["auto", "concat", "random"] = "auto"
    """The content of a unit's sample: `concat`, its records one after the other, in the order of
    files and lines; `random`, one of its records, chosen anew at each draw. `auto`: `random` for
    prompts or chats with `unit_field`, else `concat`."""

    long_records: Literal["auto", "head", "window"] = "auto"
    """The part of a text longer than `training.seq_len`: `head` takes the beginning, so the rest
    is never trained on; `window` a part chosen anew at each draw. `auto`: `window` with
    `unit_field`, whose units are often several samples long, else `head`. With prompts or chats
    only `head`: it begins a quarter of a sample before the first target, or earlier if the record
    ends within the sample, so a long prompt loses its beginning."""

    windows_per_draw: int = 1
    """K: with privacy, the number of samples of a drawn unit, each of `training.seq_len` tokens
    with its own forward and backward pass. Their gradients are averaged, and the mean is clipped
    once, so epsilon stays the same. With `unit_sampling =
    "random"` they are K different records (all, where a unit has fewer); with `long_records =
    "window"` K windows of the unit's text, each from another K-th of it. A step takes K times as
    long. Needs `privacy.gradient_method = "microbatch"`."""

    heldout_fraction: float = 0.0
    """The share of units, chosen by a hash of their names, that is never trained on and that
    `validation.enable` evaluates. The loss on them is not private."""

    store: str | None = None
    """The folder for the records' tokens, which are written once, before training: private, and as
    large as the text, about. Unset: `torchtitan_dp/prepared` in `$XDG_CACHE_HOME` or ~/.cache. Not
    within `job.dump_folder`. `torchtitan-dp prepare` fills it."""

    length_buckets: bool = True
    """With privacy: pad each sample to the smallest of a few public lengths that fits (a power of
    two times 2 x `context_parallel_degree`, at least T / 128, at most T = `training.seq_len`)
    and run equal lengths together. Epsilon stays the same. False, and the baseline without
    privacy: pad to T."""


@dataclass
class Training(theirs.Training):
    """TorchTitan's section; these defaults differ."""

    dataset: str = "text"
    """The format of the records: `text` (one file one record), `jsonl` (one line, also in .gz and
    .zst files), or `csv`, `parquet`, `arrow` or `hf` (a folder of `datasets.save_to_disk`; one
    row)."""

    dataset_path: str | None = None
    """A file, directory or glob; `python-stdlib` is the source of the running Python's standard
    library."""

    local_batch_size: int = 1
    """Samples in a microbatch of one data-parallel rank (MBS)."""

    global_batch_size: int = -1
    """The expected number of units (records) in a step; also the update's divisor. Required."""

    loss_chunk_tokens: int = 2048
    """The number of tokens whose logits exist at a time, on each rank. 0: all, as in TorchTitan."""

    feed_forward_chunk: int | Literal["auto"] = "auto"
    """With backward passes over one sample: the number of tokens whose feed-forward exists at a
    time, on each rank; backward computes it again. `auto`: 8,192 with
    `activation_checkpoint.mode = "full"`, where a rank has more tokens than that. 0: all, as in
    TorchTitan."""

    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype of forward and backward; sums over ranks and samples, norms and the update are
    fp32. `float16` has more digits and less range than `bfloat16`: gradients below 6e-8 become 0,
    first in long samples, whose tokens share one loss."""

    loss_scale: float = 1.0
    """Must stay 1. Scaling the loss up against fp16's range multiplies every record's gradient
    before it is clipped, and clipping scales it already (DP-ZeRO, section 3.4)."""

    max_norm: float = 0.0
    """TorchTitan's clipping of the summed gradient; 0 is none. With privacy it must stay 0, since
    each record's gradient is clipped by `privacy.max_grad_norm`."""


@dataclass
class Validation(theirs.Validation):
    """TorchTitan's section, with a held-out loss that a run publishes (docs/privacy.md)."""

    publish_epsilon: float | None = None
    """The epsilon, for one held-out unit, of the held-out loss that the run publishes at its end:
    the mean over units of their clipped losses, with Gaussian noise; choices made by it are
    post-processing. A second one, where a crash interrupted the first, comes on top
    (`heldout_epsilon` in `privacy.json` counts both). Held-out units are not trained on, so that a
    unit pays this or the weights' epsilon. Unset: no held-out loss is private."""

    publish_clip: float = 4.0
    """L: losses above so many nats (a sample's mean over its targets) count as L. A smaller one
    means less noise, and hides the difference between losses above it."""

    publish_delta: float | None = None
    """The delta of `publish_epsilon`. Unset: `privacy.delta`."""


@dataclass
class Metrics(theirs.Metrics):
    """TorchTitan's section, with one more option. `enable_wandb` sends as `enable_mlflow` does."""

    enable_mlflow: bool = False
    """Send the scalars that may be published to MLflow (`pip install 'torchtitan-dp[mlflow]'`), at
    `MLFLOW_TRACKING_URI`, by default a database in `job.dump_folder`, once the planned steps are
    taken. A run that is not private sends nothing."""


@dataclass
class Parallelism(theirs.Parallelism):
    """TorchTitan's section, with one more option; the default of another differs."""

    keep_weights_gathered: bool = False
    """Gather weights once a step, in its first microbatch, instead of in each
    microbatch's forward and backward pass, and free them before the update. Results are the same
    bit by bit. Every rank then keeps the whole model in `training.mixed_precision_param`: the
    plan's `--choose` finds whether that fits and pays. `fsdp_reshard_after_forward` then has no
    effect."""

    context_parallel_degree: Degree = "auto"  # type: ignore[assignment]
    """Ranks that share a sample; -1: all that the other degrees leave. `auto`: the fewest that fit,
    as the plan predicts, where `run_train.sh` or `torchtitan-dp train` starts the run, with privacy
    and without `privacy.bands = "auto"`; elsewhere as -1."""


@dataclass
class Checkpoint(theirs.Checkpoint):
    """TorchTitan's section; these defaults differ."""

    last_save_model_only: bool = False
    """Save the last checkpoint without optimizer state. False, so a finished run can resume."""

    initial_load_in_hf: bool = False
    """Start from the safetensors of `initial_load_path` (weights that another run exported, a
    release, any Hugging Face folder), or else of `model.hf_assets_path`. See
    `privacy.initial_weights_public`."""

    last_save_in_hf: bool = False
    """At the end, also write `<job.dump_folder>/hf`, which `transformers` loads. Its weights are
    in `export_dtype`, or, if that is float32 and a given `config.json` has bfloat16, in
    bfloat16."""


@dataclass
class ActivationCheckpoint(theirs.ActivationCheckpoint):
    """TorchTitan's section, with one more option, and one default that differs."""

    early_stop: bool = True
    """Recompute a block only up to the last tensor that backward needs: the last product of its
    feed-forward is spared, or, where that is in tiles, all of it."""

    offload_inputs: bool = False
    """With `mode = "full"`: keep the inputs of checkpointed blocks in the host's memory, for
    samples longer than the device's memory allows. That is the longest sample's input for each
    block: the plan reports it for a rank and a node, and a node that has less refuses the run."""


@dataclass
class Model(theirs.Model):
    """TorchTitan's section; these defaults differ."""

    flavor: str = "debug"
    """`debug`, `30M`, `100M`, `1B`, `3B` or `8B`; not used where `hf_assets_path` has a
    `config.json`."""

    hf_assets_path: str = ""
    """A Hugging Face folder. Its `config.json` decides shape, RoPE and tied weights; without one,
    `flavor` does. If this is empty, or it has neither `tokenizer.json` nor weights, text is
    tokenized as bytes."""


@dataclass
class LoRA:
    """Low-rank adapters (Hu et al. 2021): the model's own weights are frozen, and two small
    matrices beside each target are trained, clipped and noised. docs/lora.md has an example."""

    rank: int = 0
    """r: the smaller side of an adapter's matrices. 0: no adapters, all weights are trained."""

    alpha: float = 16.0
    """The adapters' output is multiplied by alpha / r."""

    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """The linear layers of each block that have adapters, by the last part of their names in
    transformers (`q_proj`, `v_proj`), or `all-linear`. The output layer and the embedding have
    none."""

    freeze_a: bool = False
    """Train B alone; A stays as it was drawn (FFA-LoRA, Sun et al. 2024). About half of the
    values have noise, and noise is not multiplied by noise."""

    export: Literal["adapter", "merged"] = "adapter"
    """The weights that `checkpoint.last_save_in_hf`, and by default a release, writes: `adapter`,
    the trained matrices in PEFT's format, for the model that training started from; `merged`, a
    whole model."""


@dataclass
class Rope:
    """Rotary embeddings for samples beyond the window that the model was trained on. Unset keys
    leave them as the model has them. No resume may change a key; exports have them in
    `config.json`. docs/running.md has an example."""

    theta: float | None = None
    """The base of wavelengths, in place of the model's `rope_theta`."""

    type: Literal["default", "linear", "yarn"] | None = None
    """The scaling, in place of the model's own, computed as `transformers` does: `default` is none;
    `linear` divides positions by `factor` (Chen et al. 2023); `yarn` divides them for long
    wavelengths only, and multiplies cosines and sines by 0.1 ln(factor) + 1 (Peng et al. 2023)."""

    factor: float | None = None
    """The new window divided by the trained one."""

    original_max_position_embeddings: int | None = None
    """The trained window in tokens, before any scaling. Only `yarn` needs it."""

    beta_fast: float | None = None
    """Of `yarn`: what turns at least so often in the trained window is not scaled. Unset: 32."""

    beta_slow: float | None = None
    """Of `yarn`: what turns at most so often is scaled by all of `factor`. Unset: 1."""


@dataclass
class EMA:
    """An average of weights (De et al. 2022), with less noise than the weights of one
    step. It is computed from these alone, so epsilon stays the same."""

    enable: bool = False
    """Keep an exponential moving average of all trained weights, in fp32 (4 bytes a value, sharded
    like them), in checkpoints, too. Validation reports its loss beside that of the weights, and
    exports (`checkpoint.last_save_in_hf`, a release) are of the average."""

    decay: float = 0.9999
    """d: the average becomes d times itself and 1 - d times the weights. After t steps d is at most
    (1 + t) / (10 + t), so the average of a short run always reaches back over about a tenth of its
    steps. 0.9 reaches back over about 10 steps, 0.99 over about 100."""


@dataclass
class JobConfig(theirs.JobConfig):
    """The sections that `job.custom_config_module = "torchtitan_dp.config"` adds."""

    privacy: Privacy = field(default_factory=Privacy)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    model: Model = field(default_factory=Model)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    lora: LoRA = field(default_factory=LoRA)
    rope: Rope = field(default_factory=Rope)
    ema: EMA = field(default_factory=EMA)
