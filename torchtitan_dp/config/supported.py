"""TorchTitan's keys: the values that work, and the keys that privacy supports.

Ranges are checked at once, since a worker would fail later, with a traceback. With privacy, only
the keys listed may differ from their defaults: a list of forbidden keys would miss those that a
later TorchTitan adds. `conflicts` goes first, and refuses single values with their own remedy.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan_dp.config import JobConfig

# By section. The keys that `schema` defines are supported too.
_SUPPORTED = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
    "enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder "
    "save_for_all_ranks",
    "model": "name",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "seq_len steps mixed_precision_reduce gc_freq gc_debug",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree "
    "fsdp_reshard_after_forward context_parallel_degree context_parallel_load_balancer "
    "context_parallel_rotate_method",
    "checkpoint": "enable folder interval initial_load_path export_dtype async_mode keep_latest_k "
    "enable_first_step_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option "
    "per_op_sac_force_recompute_mm_shapes_by_fqns "
    "early_stop memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check "
    "debug",
    "compile": "enable components backend",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
    "save_traces_file_prefix",
    "validation": "enable freq steps",
    "debug": "seed deterministic deterministic_warn_only",
}


def _share(value: Any) -> bool:
    return bool(0 <= value <= 1)


def _not_negative(value: Any) -> bool:
    return bool(0 <= value < float("inf"))


def _positive(value: Any) -> bool:
    return bool(value > 0)


# By key: the test of a value, and its words. TorchTitan or PyTorch fails on others later.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer.name": (lambda name: name in ("AdamW", "Adam"), "'AdamW' or 'Adam'"),
    "optimizer.beta1": (lambda beta: 0 <= beta < 1, "at least 0 and below 1"),
    "optimizer.beta2": (lambda beta: 0 <= beta < 1, "at least 0 and below 1"),
    "optimizer.eps": (_not_negative, "0 or more"),
    "optimizer.weight_decay": (_not_negative, "0 or more"),
    "lr_scheduler.warmup_steps": (_not_negative, "0 or more"),
    "lr_scheduler.decay_ratio": (lambda ratio: ratio is None or _share(ratio), "from 0 to 1"),
    "lr_scheduler.min_lr_factor": (_share, "from 0 to 1"),
    "training.gc_freq": (_positive, "1 or more"),
    "comm.init_timeout_seconds": (_positive, "1 or more"),
    "comm.train_timeout_seconds": (_positive, "1 or more"),
    "checkpoint.keep_latest_k": (lambda k: k == 0 or k > 1, "2 or more, or 0 to keep all"),
    "activation_checkpoint.selective_ac_option": (
        lambda option: option == "op" or (option.isdecimal() and int(option) > 0),
        "'op', or N to checkpoint every Nth layer",
    ),
    "activation_checkpoint.memory_budget": (_share, "from 0 to 1"),
    "activation_checkpoint.determinism_check": (
        lambda check: check in ("default", "none"),
        "'default' or 'none'",
    ),
}


def check_values(config: JobConfig) -> None:
    """Refuse values of TorchTitan's keys that TorchTitan or PyTorch would fail on later.

    Raises:
        ValueError: one line for the user, that names the key, its value and the remedy.
    """
    values = {key: value for key, value, _ in _values(config, type(config)())}
    for key, (is_right, words) in _RANGES.items():
        if not is_right(values[key]):
            raise ValueError(f"{key} = {values[key]!r}: must be {words}")
    if config.compile.enable:
        import torch._dynamo  # compiling imports it anyway

        known = torch._dynamo.list_backends(None)
        if config.compile.backend not in known:
            raise ValueError(
                f"compile.backend = {config.compile.backend!r}: must be one of {', '.join(known)}"
            )


def check_supported(config: JobConfig) -> None:
    """Refuse every key that is not supported with privacy and differs from its default.

    Raises:
        ValueError: one line for the user, that names the key, its value and the remedy.
    """
    supported = supported_keys()
    for key, value, default in _values(config, type(config)()):
        if key not in supported and value != default:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            usual = str(default).lower() if isinstance(default, bool) else repr(default)
            raise ValueError(
                f"{key} = {shown}: not supported with privacy; remove it (the default is {usual})"
            )


def supported_keys() -> set[str]:
    """Return the keys, each as `section.key`, that privacy supports."""
    keys = {f"{section}.{key}" for section, names in _SUPPORTED.items() for key in names.split()}
    for section in dataclasses.fields(JobConfig):
        own: Any = section.default_factory
        keys |= {f"{section.name}.{key.name}" for key in dataclasses.fields(own)}
    return keys


def _values(config: Any, default: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of a configuration with its value and its default."""
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, usual, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value, usual
