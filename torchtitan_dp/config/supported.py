"""The values of keys that work, and the keys of TorchTitan that privacy supports.

Ranges of all sections are checked at once: a worker would fail later, with a traceback, or spend
epsilon on weights that learn nothing. With privacy, only the keys listed may differ from their
defaults: a list of forbidden keys would miss those that a later TorchTitan adds. Unsupported
features read, move or clip gradients, change who is sampled, lose the ledger, or leak private
values.
"""

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchtitan_dp.config import JobConfig
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
    _least(1, "at least 1"): "training.steps training.local_batch_size training.gc_freq "
    "checkpoint.interval profiling.profile_freq profiling.profiler_active metrics.log_freq "
    "validation.freq data.windows_per_draw",
    _least(0, f"from 0 to {_LARGEST}", most=_LARGEST): "debug.seed privacy.debug_seed",
    _least(1, "from 1 to 1e9", most=10**9): "comm.init_timeout_seconds comm.train_timeout_seconds",
    _least(1, "at least 1 (or -1 for auto)"): (
        "parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree"
    ),
    _least(
        1, "1; use context_parallel_degree or data_parallel_shard_degree", most=1
    ): "parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree "
    "parallelism.expert_parallel_degree",
}
_RANGES = {key: of for of, names in _OF_SEVERAL.items() for key in names.split()} | {
    "model.tokenizer_path": (lambda _: False, "left out; use model.hf_assets_path"),
    "optimizer.name": _one_of("AdamW", "Adam", "MomentumSGD"),
    "optimizer.lr": _least(0, "a positive number (1e-3, say)"),
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
