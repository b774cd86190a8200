"""The settings that are refused, and the remedies: values of single keys, keys that privacy does
not support, and settings that cannot work together.

A row is a line, "key: reason; remedy", into which the key's value is put; it is yielded where the
key is refused. Rows are in order of their importance: the first that is refused is the one that is
shown, and a row may rely on those before it.

Ranges of all sections are checked at once: a worker would fail later, with a traceback, or spend
epsilon on weights that learn nothing. With privacy, only the keys listed may differ from their
defaults: a list of forbidden keys would miss those that a later TorchTitan adds. Unsupported
features read, move or clip gradients, change who is sampled, lose the ledger, or leak private
values.
"""

import dataclasses
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    DEGREES,
    METHODS,
    mesh_degrees,
    record_paths,
    trains_one_sample,
    unit_word,
)
from torchtitan_dp.data.formats import FORMATS
from torchtitan_dp.privacy.settings import FEWEST, MOST

# By section. The keys that `schema` defines are supported too.
_SUPPORTED = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
    "enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard enable_wandb disable_color_printing save_tb_folder",
    "model": "name",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "seq_len steps mixed_precision_reduce gc_freq gc_debug",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree "
    "fsdp_reshard_after_forward context_parallel_degree context_parallel_load_balancer "
    "context_parallel_rotate_method",
    "checkpoint": "enable folder interval initial_load_path export_dtype async_mode keep_latest_k",
    "activation_checkpoint": "mode selective_ac_option early_stop memory_budget debug "
    "per_op_sac_force_recompute_mm_shapes_by_fqns visualize_memory_budget_pareto "
    "preserve_rng_state determinism_check",
    "compile": "enable components backend",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
    "save_traces_file_prefix",
    "validation": "enable freq steps",
    "debug": "seed deterministic deterministic_warn_only",
}

# Remedies of keys that must keep their defaults, where "remove it" is not enough.
_REMEDIES = {
    "training.max_norm": "set it to 0; each record's gradient is clipped by privacy.max_grad_norm",
    "training.loss_scale": "set it to 1; a scaled loss scales the gradient that is clipped; where "
    "fp16 loses small ones, set training.mixed_precision_param to 'bfloat16'",
    "training.dtype": "set it to 'float32' (and mixed_precision_param to 'bfloat16')",
    "checkpoint.load_step": "set it to -1; a branch would share this folder's ledger",
    "checkpoint.last_save_model_only": "set it to false: a checkpoint of weights alone lacks the "
    "ledger of their spending; torchtitan-dp release publishes them with it",
    "checkpoint.initial_load_model_only": "set it to true; to go on, copy a whole job.dump_folder",
}

_Range = tuple[Callable[[Any], bool], str]
"""The test of a value, and its words, which follow "must be"."""

_LARGEST = 2**63 - 1  # a whole number of PyTorch's


def _one_of(*values: str | None) -> _Range:
    *most, last = map(repr, values)
    return lambda value: value in values, f"{', '.join(most)} or {last}"


def _least(least: float, words: str, *others: object, most: float = math.inf) -> _Range:
    return lambda value: value in others or least <= value <= most, words


def _above(least: float, words: str) -> _Range:
    return lambda value: value > least, words


# All numbers must be finite as well, also those of other keys. Unset keys are not tested.
_OF_SEVERAL: dict[_Range, str] = {
    (operator.not_, "empty: a configuration runs no code here; remove it"): (
        "experimental.custom_import experimental.custom_args_module"
    ),
    _least(0, "from 0 to 1", most=1): "lr_scheduler.decay_ratio lr_scheduler.min_lr_factor "
    "activation_checkpoint.memory_budget",
    (lambda value: 0 <= value < 1, "at least 0 and below 1"): (
        "optimizer.beta1 optimizer.beta2 data.heldout_fraction"
    ),
    _least(0, "0 or more"): "optimizer.eps optimizer.weight_decay lr_scheduler.warmup_steps "
    "training.max_norm comm.trace_buf_size profiling.profiler_warmup",
    _above(0, "a positive number"): "training.loss_scale privacy.target_epsilon "
    "validation.reference_loss",
    _least(1, "at least 1"): "training.steps training.seq_len training.local_batch_size "
    "training.gc_freq parallelism.data_parallel_replicate_degree "
    "checkpoint.interval profiling.profile_freq profiling.profiler_active metrics.log_freq "
    "validation.freq data.windows_per_draw",
    _least(0, f"from 0 to {_LARGEST}", most=_LARGEST): "debug.seed privacy.debug_seed",
    _least(1, "from 1 to 1e9", most=10**9): "comm.init_timeout_seconds comm.train_timeout_seconds",
    _least(1, "at least 1, or -1 (the rest)"): "parallelism.data_parallel_shard_degree",
    _least(
        1, "1; use context_parallel_degree or data_parallel_shard_degree", most=1
    ): "parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree "
    "parallelism.expert_parallel_degree",
}

_RANGES = {key: of for of, names in _OF_SEVERAL.items() for key in names.split()} | {
    "model.tokenizer_path": (lambda _: False, "left out; use model.hf_assets_path"),
    "optimizer.name": _one_of("AdamW", "Adam", "MomentumSGD"),
    "optimizer.lr": _least(0, "a positive number (1e-3, say)"),
    "training.dataset": _one_of(*FORMATS),
    "training.loss_chunk_tokens": _least(0, "at least 1, or 0 for all logits at once"),
    "training.feed_forward_chunk": _least(0, "at least 1, 0 for all at once, or 'auto'", "auto"),
    "parallelism.context_parallel_degree": _least(1, "at least 1, -1 (the rest) or 'auto'", "auto"),
    "parallelism.context_parallel_load_balancer": _one_of("headtail", None),
    "checkpoint.keep_latest_k": _least(2, "2 or more, or 0 to keep all", 0),
    "checkpoint.initial_load_in_hf_quantized": (operator.not_, "false; use bfloat16 or float32"),
    "activation_checkpoint.selective_ac_option": (
        lambda option: option == "op" or (option.isdecimal() and int(option) > 0),
        "'op', or N to checkpoint every Nth layer",
    ),
    "compile.backend": _one_of("inductor", "aot_eager", "eager", "cudagraphs"),
    "activation_checkpoint.determinism_check": _one_of("default", "none"),
    "validation.steps": _least(1, "1 or more, or -1 for all held-out units", -1),
    "validation.publish_epsilon": _above(0, "a positive number (1, say)"),
    "validation.publish_clip": _above(0, "a positive number of nats (4, say)"),
    "validation.publish_delta": (
        lambda delta: 0 < delta < 1,
        "between 0 and 1 (a tenth of 1 / number of held-out units, or less)",
    ),
    # With the largest clipping norm, fp32 still has the square of a gradient, which Adam keeps.
    "privacy.noise_multiplier": _least(0, "from 0 to 1e9", most=1e9),
    "privacy.max_grad_norm": _least(1e-9, "from 1e-9 to 1e9, for fp32", most=1e9),
    "privacy.delta": (lambda delta: 0 < delta < 1, "between 0 and 1 (1e-5, say)"),
    "privacy.sample_rate": (lambda q: 0 < q <= 1, "a probability, above 0 and at most 1"),
    "privacy.bands": _least(1, "1 or more, or 'auto'", "auto"),
    "privacy.projections": _least(FEWEST, f"from {FEWEST} to {MOST}; 32 is usual", most=MOST),
    "lora.rank": _least(0, "1 or more, or 0 for no adapters"),
    "lora.alpha": _above(0, "a positive number (2 x rank, say)"),
    "ema.decay": (lambda decay: 0 <= decay < 1, "at least 0 and below 1 (0.9999, say)"),
}
"""The range of each key's value."""


class Mistakes(ValueError):
    """The user's mistakes, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; and ".join(lines))
        self.lines = lines


def refusals(config: JobConfig, rows: Iterable[str]) -> Iterator[str]:
    """Put the key's value into each row, "key: reason; remedy", that is refused."""
    for line in rows:
        key, _, remedy = line.partition(": ")
        value = operator.attrgetter(key)(config)
        given = "is not set" if value is None else f"= {_shown(value)}"
        yield f"{key} {given}: {remedy}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def out_of_range(config: JobConfig) -> Iterator[str]:
    """Yield the rows of numbers that are not finite, and of values that a run would fail on."""
    for key, value, _ in values(config):
        holds, words = _RANGES.get(key, (lambda _: True, "a number"))
        is_finite = not isinstance(value, int | float) or abs(value) <= sys.float_info.max
        if value is not None and not (is_finite and holds(value)):
            yield f"{key}: must be {'' if is_finite else 'finite, '}{words}"
        elif isinstance(value, int) and abs(value) > _LARGEST:
            yield f"{key}: must be from -{_LARGEST} to {_LARGEST}"


def unsupported(config: JobConfig) -> Iterator[str]:
    """Yield the rows of keys that privacy does not support, whose defaults they must keep."""
    supported = supported_keys()
    for key, value, default in values(config):
        if key not in supported and value != default:
            usual = f"remove it (the default is {_shown(default)})"
            yield f"{key}: {_REMEDIES.get(key, f'not supported with privacy; {usual}')}"


def supported_keys() -> set[str]:
    """Return the keys, each as `section.key`, that privacy supports."""
    listed = {f"{section}.{key}" for section, names in _SUPPORTED.items() for key in names.split()}
    return (listed | {key for key, _ in keys(JobConfig)}) - _REMEDIES.keys()


def values(config: JobConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of a configuration with its value and its default."""
    default = type(config)()
    for key, _ in keys(type(config)):
        get = operator.attrgetter(key)
        yield key, get(config), get(default)


def keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys, as `section.key`, with their annotations."""
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            yield from keys(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def check(config: JobConfig, world_size: int | None) -> None:
    """Raise `Mistakes` for settings that cannot work together: of each table the first row, with
    key, value and remedy. `config` has its values in range, and degrees, sampling and the gradient
    method resolved; the mesh is not checked without `world_size`."""
    tables = [_mesh(config, world_size)] if world_size else []
    tables += [rows(config) for rows in (_steps, _length, _memory, _heldout, _weights, _samples)]
    if config.privacy.enable:
        tables.append(_privacy(config))
    mistakes = [line for rows in tables for line in islice(refusals(config, rows), 1)]
    if config.privacy.enable:
        known = {line.split()[0] for line in mistakes}
        rows = refusals(config, unsupported(config))
        mistakes += [line for line in rows if line.split()[0] not in known]
        mistakes = mistakes or [*islice(refusals(config, _methods(config)), 1)]
    if mistakes:
        raise Mistakes(mistakes)


def _mesh(config: JobConfig, world_size: int) -> Iterator[str]:
    degrees = dict(zip(DEGREES, mesh_degrees(config), strict=True))
    product, largest = math.prod(degrees.values()), max(degrees, key=degrees.__getitem__)
    listed = " x ".join(f"{key} {degree}" for key, degree in degrees.items())
    if product != world_size:
        yield (
            f"parallelism.{largest}: {listed} = {product}, but there are {world_size} processes "
            "(NGPU x nodes); set a degree to -1 to let it follow"
        )


def _steps(config: JobConfig) -> Iterator[str]:
    steps, schedule = config.training.steps, config.lr_scheduler.total_steps
    privacy, profiling = config.privacy, config.profiling
    if schedule is not None and schedule < steps:
        yield f"lr_scheduler.total_steps: below training.steps = {steps}; raise or remove it"
    adds_noise = privacy.enable and privacy.noise_multiplier != 0
    if config.optimizer.name == "MomentumSGD" and not adds_noise:
        yield "optimizer.name: its learning rate is in units of the noise, here 0; use 'AdamW'"
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        yield f"profiling.profile_freq: below profiler_warmup + profiler_active = {cycle}; raise it"


def _length(config: JobConfig) -> Iterator[str]:
    seq_len, multiple = config.training.seq_len, 2 * config.parallelism.context_parallel_degree
    below = seq_len // multiple * multiple
    if seq_len != below:
        yield (
            f"training.seq_len: must be a multiple of 2 x context_parallel_degree = {multiple}; "
            f"try {' or '.join(sorted({str(max(below, multiple)), str(below + multiple)}))}"
        )


def _memory(config: JobConfig) -> Iterator[str]:
    blocks, method = config.activation_checkpoint, config.privacy.gradient_method
    mode = blocks.mode
    if config.compile.enable and mode == "selective" and blocks.selective_ac_option == "op":
        yield "activation_checkpoint.selective_ac_option: set it to '1', or compile.enable to false"
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload: weights stay on the device; set it to false"
    tiled = config.training.feed_forward_chunk not in ("auto", 0)
    if tiled and mode not in ("none", "full"):
        yield (
            f"training.feed_forward_chunk: with activation_checkpoint.mode = '{mode}' the products "
            "of tiles would be kept; set the mode to 'full', or feed_forward_chunk to 'auto'"
        )
    if tiled and not trains_one_sample(config):
        yield (
            "training.feed_forward_chunk: tiles are for backward passes over one sample; set "
            f"privacy.gradient_method, here '{method}', to 'microbatch', or this to 'auto'"
        )
    if blocks.offload_inputs and mode != "full":
        yield "activation_checkpoint.offload_inputs: set activation_checkpoint.mode = 'full'"
    store, outputs = config.data.store, os.path.realpath(config.job.dump_folder) + os.sep
    place = os.path.realpath(os.path.expanduser(store or "/")) + os.sep
    if place.startswith(outputs):
        yield f"data.store: lies within job.dump_folder = '{config.job.dump_folder}'; move it"
    for path in record_paths(config):
        if os.path.isdir(path) and Path(outputs).is_relative_to(os.path.realpath(path)):
            yield (
                f"job.dump_folder: lies within training.dataset_path = '{path}', so its files "
                "would become records; name another folder"
            )


def _heldout(config: JobConfig) -> Iterator[str]:
    validation, key = config.validation, "validation.publish_epsilon"
    publishes = validation.publish_epsilon is not None
    if validation.enable and config.data.heldout_fraction == 0:
        yield "data.heldout_fraction: validation.enable = true needs held-out units; set it (0.05)"
    if validation.publish_delta is not None and not publishes:
        yield f"validation.publish_delta: no held-out loss is published; set {key}, or remove it"
    if publishes and not validation.enable:
        yield f"{key}: no held-out loss is computed; set validation.enable = true"
    if publishes and not config.privacy.enable:
        yield f"{key}: only private runs publish it; set privacy.enable = true, or remove it"
    if publishes and config.privacy.sample_rate is not None:
        yield f"{key}: a public privacy.sample_rate keeps its divisor secret; remove one of the two"


def _weights(config: JobConfig) -> Iterator[str]:
    checkpoint, lora, averages = config.checkpoint, config.lora, config.ema.enable
    if checkpoint.initial_load_path and not checkpoint.initial_load_in_hf:
        yield (
            "checkpoint.initial_load_in_hf: weights of another run are read from safetensors (its "
            "hf/, or a release); set it to true, or remove checkpoint.initial_load_path"
        )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield "checkpoint.initial_load_model_only: Hugging Face folders have a model; set it true"
    if checkpoint.load_step != -1:
        yield f"checkpoint.load_step: {_REMEDIES['checkpoint.load_step']}"
    loads = checkpoint.initial_load_in_hf or checkpoint.initial_load_path
    if loads and not checkpoint.enable:
        yield "checkpoint.enable: no initial weights are loaded without it; set it to true"
    if lora.rank > 0 and not 0 < len(set(lora.targets)) == len(lora.targets):
        yield "lora.targets: name each target once, and at least one (q_proj, say)"
    if averages and config.training.dtype != "float32":
        yield (
            "training.dtype: averages (ema.enable = true) are of fp32 weights; set it to 'float32' "
            "(mixed_precision_param sets the dtype of computation)"
        )
    if averages and checkpoint.async_mode.lower() == "async_with_pinned_mem":
        yield "checkpoint.async_mode: ema.enable = true changes weights that it copies; use 'async'"


def _samples(config: JobConfig) -> Iterator[str]:
    data, method = config.data, config.privacy.gradient_method
    for key in ("prompt_field", "messages_field"):
        if getattr(data, key) is not None and data.long_records == "window":
            yield f"data.long_records: data.{key} puts a sample around its answer; use 'head'"
    if data.messages_field is not None and (data.prompt_field or data.text_field != "text"):
        other = "prompt_field" if data.prompt_field else "text_field"
        yield f"data.messages_field: data.{other} is set, too; remove one of the two"
    if data.prompt_field == data.text_field:
        yield "data.prompt_field: it is data.text_field, that of the answer; name another field"
    read = [data.messages_field] if data.messages_field else [data.text_field, data.prompt_field]
    if data.unit_field is not None and data.unit_field in read:
        yield "data.unit_field: it is the field of the text, too; name a field for each"
    several, key = data.windows_per_draw > 1, "data.windows_per_draw"
    if several and not config.privacy.enable:
        yield f"{key}: without privacy no unit is drawn; set it to 1"
    if several and data.unit_sampling == "concat" and data.long_records == "head":
        yield (
            f"{key}: each unit has one sample; set data.long_records = 'window' or "
            "data.unit_sampling = 'random'"
        )
    if several and not METHODS[method].averages_windows:
        yield f"{key}: needs privacy.gradient_method = 'microbatch', not '{method}'"
    by, has_owners = data.unit_field, isinstance(data.unit_field, list)
    if has_owners and (not by or "" in by or len(set(by)) < len(by)):
        yield "data.unit_field: name each field of owners once, and at least one ('sender', say)"
    if has_owners and config.privacy.enable and config.privacy.sample_rate is not None:
        yield (
            "data.unit_field: who owns what must be public, and with a public privacy.sample_rate "
            "it is not; remove that, or name one field"
        )
    if data.not_owners and not has_owners:
        yield "data.not_owners: only a list of fields as data.unit_field has owners; remove one"
    if data.unit_field is None and data.unit_sampling != "concat":
        yield "data.unit_sampling: units of one record have no choice; set data.unit_field"


def _privacy(config: JobConfig) -> Iterator[str]:
    privacy = config.privacy
    epsilon, sigma = privacy.target_epsilon, privacy.noise_multiplier
    if epsilon is None and sigma is None:
        yield "privacy.target_epsilon: give one (8.0, say), or privacy.noise_multiplier"
    if epsilon is not None and sigma is not None:
        yield (
            f"privacy.target_epsilon: privacy.noise_multiplier = {sigma} is set as well; set "
            "exactly one (--privacy.target_epsilon None unsets the TOML's)"
        )
    if privacy.delta is None:
        yield f"privacy.delta: set a tenth of 1 / number of {unit_word(config)}s, or less (1e-5)"
    banded, auto = privacy.noise == "banded", privacy.bands == "auto"
    if banded and auto and epsilon is None:
        yield "privacy.bands: needs privacy.target_epsilon; set that, or a number of bands"
    if not banded and not auto and privacy.bands != 1:
        yield "privacy.bands: only correlated noise has bands; set privacy.noise to 'banded'"
    if config.training.global_batch_size < 1:
        yield "training.global_batch_size: set the expected number of records in a step"


def _methods(config: JobConfig) -> Iterator[str]:
    """Yield the rows of supported keys that a mechanism or a gradient method does not cover."""
    privacy, checkpoint, blocks = config.privacy, config.checkpoint, config.activation_checkpoint
    name, method = privacy.gradient_method, METHODS[privacy.gradient_method]
    allocates, banded = privacy.sampling == "allocation", privacy.noise == "banded"
    if allocates and privacy.accountant != "pld":
        yield "privacy.accountant: privacy.sampling = 'allocation' needs PLD; set it to 'pld'"
    if banded and privacy.secure_noise:
        yield (
            "privacy.secure_noise: sums with earlier noise (privacy.noise = 'banded') on a grid "
            "are not proven; set it to false, or privacy.noise to 'independent'"
        )
    if banded and allocates:
        yield "privacy.sampling: with privacy.noise = 'banded' rounds are not proven; use 'poisson'"
    if method.estimates_norms and privacy.underestimates == "accounted":
        for key, value, needed, why in (
            ("accountant", privacy.accountant, "pld", "only PLD is tight for a step's mixture"),
            ("clipping", privacy.clipping, "flat", "errors of several groups are not counted"),
            ("noise", privacy.noise, "independent", "a unit's steps are not counted together"),
            ("sampling", privacy.sampling, "poisson", "a round of mixtures is not counted"),
        ):
            if value != needed:
                yield (
                    f"privacy.{key}: with privacy.underestimates = 'accounted' {why}; set it to "
                    f"'{needed}', or privacy.underestimates = 'capped'"
                )
    if config.compile.enable and method.per_sample_layers:
        yield f"compile.enable: layers of '{name}' are not compiled; set it to false"
    by_operation = blocks.mode == "selective" and blocks.selective_ac_option == "op"
    if method.backward_passes(privacy) > 1 and by_operation:
        yield (
            "privacy.ghost_passes: with activation_checkpoint.selective_ac_option = 'op' PyTorch "
            "allows one backward pass; set ghost_passes = 'one', or selective_ac_option = '1'"
        )
    folder = checkpoint.folder
    if folder in ("", ".", "..") or "/" in folder or folder.endswith(".damaged"):
        yield "checkpoint.folder: give the name of a folder inside job.dump_folder ('checkpoint')"
    if checkpoint.async_mode.lower() == "async_with_pinned_mem":
        yield "checkpoint.async_mode: its process would outlive a killed run; use 'async'"
