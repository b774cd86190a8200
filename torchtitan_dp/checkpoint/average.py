"""The average of weights (`[ema]`) in a checkpoint: under which names, and whether one is there."""

from torchtitan_dp.checkpoint import safe_load

AVERAGE = "ema"
"""The state, beside TorchTitan's own, that holds it."""

WEIGHTS = "weights"
"""Its part that holds one average a trained parameter, by the parameter's name."""


def average_name(parameter: str) -> str:
    """Return the name that the average of a parameter has in a checkpoint."""
    return f"{AVERAGE}.{WEIGHTS}.{parameter}"


def has_average(step: str) -> bool:
    """Tell whether a checkpoint holds an average: it was saved while `ema.enable` was true.

    Args:
        step: the checkpoint's own folder.

    Raises:
        ValueError: its metadata is damaged.
    """
    return safe_load.holds(step, f"{AVERAGE}.{WEIGHTS}")
