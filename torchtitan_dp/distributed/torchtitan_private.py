"""Every private name of TorchTitan 0.2.2 that the package uses, each behind one function.

`tests/test_seams.py` finds private names in any other file, and lists the public ones.
"""

from typing import Any


def merged_sections(ours: type) -> Any:
    """Return TorchTitan's configuration with sections of ours: its dataclass, extended.

    The public way is `parse_args`, which reads a file and the command line as well, its own way.
    """
    from torchtitan.config import ConfigManager, JobConfig

    return ConfigManager._merge_configs(JobConfig, ours)


def from_values(schema: Any, values: dict[str, Any]) -> Any:
    """Return a configuration of checked values, by section; `parse_args` takes those of a file."""
    from torchtitan.config import ConfigManager

    return ConfigManager()._dict_to_dataclass(schema, values)


def operations_to_save() -> set[Any]:
    """Return the operations that TorchTitan's selective checkpointing saves; `apply_ac` has none of
    its own."""
    from torchtitan.models.llama3.infra import parallelize

    return {*parallelize._op_sac_save_list}


def is_saved_at(manager: Any, step: int, last_step: bool = False) -> bool:
    """Return whether a `CheckpointManager` saves after a step. Its `save` does not say."""
    saved: bool = manager._should_save(step, last_step)
    return saved
