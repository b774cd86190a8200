"""The configuration of a run: the sections that this project adds to TorchTitan's.

The docstring below each field is its reference; `scripts/reference.py` puts them into the
documents. `JobConfig` is merged into TorchTitan's, so a section here needs only the fields that are
new or whose default differs.

`load` reads a TOML and the command line, by the `keys` of the schema, and keeps a run's
configuration in its folder; `checks` refuses settings; `derived` are facts that
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
        Parallelism = Validation = object


@dataclass
class Data:
    """How records become samples; `training.dataset` and `training.dataset_path` locate them."""

    text_field: str = "text"
    """The field of a row with the record's text."""

    prompt_field: str | None = None
    """The field of a row with a prompt, which the model reads before `text_field`. Only the latter,
    the answer, is learned. The two are tokenized separately, with nothing between them."""

    messages_field: str | None = None
    """In place of `text_field`, the field of a row with a chat: a list of `{"role": ..., "content":
    ...}` with two texts. The tokenizer's own chat template formats it, and only the turns of the
    role `assistant` are targets (docs/data.md)."""

    unit_field: str | list[str] | None = None
    """The owner of a record (a patient, user or repository), whose records together are then the
    unit that is drawn, clipped and protected. A field with a string or a whole number; for `text`
    only `folder`, the first folder below `training.dataset_path`. A row without it is a unit of its
    own that contributes nothing. Unset: every record is a unit. A list, `["sender", "recipient"]`:
    each field names owners, or holds a list of them, all of whom are protected (docs/data.md)."""

    not_owners: list[str] = field(default_factory=list)
    """With a list as `unit_field`: names that are not protected, such as a doctor's in all letters.
    """

    unit_sampling: Literal["auto", "concat", "random"] = "auto"
    """The content of a unit's sample: `concat`, its records one after the other; `random`, one of
    its records, chosen anew at each draw. `auto`: `random` for prompts or chats with `unit_field`,
    else `concat`."""

    long_records: Literal["auto", "head", "window"] = "auto"
    """The part of a text longer than `training.seq_len`: `head`, the beginning; `window`, a part
    chosen anew at each draw. `auto`: `window` with `unit_field`, else `head`. With prompts or chats
    only `head`, which begins a quarter of a sample before the first target."""

    windows_per_draw: int = 1
    """K: with privacy, the number of samples of a drawn unit. Their gradients are averaged, and the
    mean is clipped once, so epsilon stays the same and a step takes K times as long. With
    `unit_sampling = "random"` they are K different records, with `long_records = "window"` windows
    of K parts of the unit's text. Needs `privacy.gradient_method = "microbatch"`."""

    heldout_fraction: float = 0.0
    """The share of units, chosen by a hash of their names, that is never trained on and that
    `validation.enable` evaluates. The loss on them is not private."""

    store: str | None = None
    """The folder for the records' tokens, which are private and about as large as the text. Unset:
    `torchtitan_dp/prepared` in `$XDG_CACHE_HOME` or ~/.cache. Not within `job.dump_folder`.
    `torchtitan-dp prepare` fills, lists and erases it."""

    length_buckets: bool = True
    """With privacy: pad each sample to the smallest of a few public lengths that fits (a power of
    two times 2 x `context_parallel_degree`, from T / 128 to T = `training.seq_len`) and run equal
    lengths together. False, and without privacy: pad to T."""


@dataclass
class Training(theirs.Training):
    """TorchTitan's section; these defaults differ."""

    dataset: str = "text"
    """The format of the records: `text` (one file one record), `jsonl` (one line, also in .gz and
    .zst files), or `csv`, `parquet`, `arrow` or `hf` (a folder of `datasets.save_to_disk`; one
    row)."""

    dataset_path: str | list[str] | None = None
    """A file, directory or glob, or a list of them; `hf://datasets/owner/name/PATH` is on the
    Hugging Face hub; `python-stdlib` is the source of the running Python's standard
    library, `python-packages` that of the installed `transformers`, `huggingface_hub` and
    `datasets` (files of 300 bytes to 32 KiB)."""

    local_batch_size: int = 1
    """Samples in a microbatch of one data-parallel rank (MBS)."""

    global_batch_size: int = -1
    """The expected number of units (records) in a step; also the update's divisor. Required."""

    loss_chunk_tokens: int = 2048
    """The number of tokens whose logits exist at a time, on each rank. 0: all, as in TorchTitan."""

    feed_forward_chunk: int | Literal["auto"] = "auto"
    """With one sample a microbatch: the number of tokens whose feed-forward exists at a time, on
    each rank; backward computes it again. `auto`: 8,192 with `activation_checkpoint.mode = "full"`,
    where a rank has more tokens. 0: all, as in TorchTitan."""

    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype of forward and backward; sums over ranks and samples, norms and the update are
    fp32. With `float16` gradients below 6e-8 become 0, first in long samples."""

    loss_scale: float = 1.0
    """Must stay 1: clipping scales each record's gradient already (DP-ZeRO, section 3.4)."""

    max_norm: float = 0.0
    """TorchTitan's clipping of the summed gradient; 0 is none. With privacy it must stay 0."""


@dataclass
class Validation(theirs.Validation):
    """TorchTitan's section, with a held-out loss that a run publishes (docs/privacy.md)."""

    publish_epsilon: float | None = None
    """The epsilon, for one held-out unit, of the held-out loss that the run publishes at its end
    with Gaussian noise (docs/privacy.md); choices made by it are post-processing. Unset: no
    held-out loss is private."""

    publish_clip: float = 4.0
    """L: losses above so many nats (a sample's mean over its targets) count as L. A smaller one
    means less noise."""

    publish_delta: float | None = None
    """The delta of `publish_epsilon`. Unset: `privacy.delta`."""

    reference_loss: float | None = None
    """A held-out loss to compare with, such as that of tuning without privacy: the last lines of a
    run say how much of the way to it was made."""


@dataclass
class Parallelism(theirs.Parallelism):
    """TorchTitan's section, with one more option; the default of another differs."""

    keep_weights_gathered: bool = False
    """Gather weights once a step instead of in each microbatch's forward and backward pass. Results
    are the same bit by bit. Every rank then keeps the whole model in
    `training.mixed_precision_param`; `fsdp_reshard_after_forward` has no effect."""

    context_parallel_degree: Degree = "auto"  # type: ignore[assignment]
    """Ranks that share a sample; -1: all that the other degrees leave. `auto`: the fewest that fit,
    as the plan predicts, where `run_train.sh` or `torchtitan-dp train` starts the run; under a
    plain `torchrun`, and with `privacy.bands = "auto"`, as -1."""


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
    """Recompute a block only up to the last tensor that backward needs."""

    offload_inputs: bool = False
    """With `mode = "full"`: keep the inputs of checkpointed blocks in the host's memory. The plan
    reports how much that is for a rank and a node; a node that has less refuses the run."""


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

    targets: list[str] = field(default_factory=[ALL_LINEAR].copy)
    """The linear layers of each block that have adapters, by the last part of their names in
    transformers (`q_proj`, `v_proj`), or `all-linear`. The output layer and the embedding have
    none."""

    freeze_a: bool = False
    """Train B alone; A stays as it was drawn (FFA-LoRA, Sun et al. 2024): noise is not multiplied
    by noise."""

    export: Literal["adapter", "merged"] = "adapter"
    """The weights that `checkpoint.last_save_in_hf`, and by default a release, writes: `adapter`,
    the matrices in PEFT's format; `merged`, a whole model."""


@dataclass
class EMA:
    """An average of weights (De et al. 2022), with less noise than the weights of one
    step. It is computed from these alone, so epsilon stays the same."""

    enable: bool = False
    """Keep an exponential moving average of all trained weights, in fp32, in checkpoints, too.
    Validation reports its loss beside that of the weights, and exports and releases are of the
    average."""

    decay: float = 0.9999
    """d: the average becomes d times itself and 1 - d times the weights. After t steps d is at most
    (1 + t) / (10 + t): the average of a short run reaches back over about a tenth of it."""


@dataclass
class JobConfig(theirs.JobConfig):
    """The sections that `job.custom_config_module = "torchtitan_dp.config"` adds."""

    privacy: Privacy = field(default_factory=Privacy)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    model: Model = field(default_factory=Model)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    lora: LoRA = field(default_factory=LoRA)
    ema: EMA = field(default_factory=EMA)
