"""Every private name of TorchTitan 0.2.2 that the package uses, each behind one function.

`tests/test_seams.py` finds private names in any other file, and lists the public ones.
"""

from typing import Any


def operations_to_save() -> set[Any]:
    """Return the operations that TorchTitan's selective checkpointing saves; `apply_ac` has none of
    its own."""
    from torchtitan.models.llama3.infra import parallelize

    return {*parallelize._op_sac_save_list}


def is_saved_at(manager: Any, step: int, last_step: bool = False) -> bool:
    """Return whether a `CheckpointManager` saves after a step. Its `save` does not say."""
    saved: bool = manager._should_save(step, last_step)
    return saved
