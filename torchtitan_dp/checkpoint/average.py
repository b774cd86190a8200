"""The average of weights (`[ema]`) in a checkpoint: its names there, and its `ema.decay`."""

import json
from typing import Any

from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.models.ema import WEIGHTS

AVERAGE = "ema"
"""The state of the average, beside TorchTitan's own states."""

DECAY = f"{AVERAGE}.decays"
"""The state of `ema.decay`: [[decay, 1]] as JSON, the form in which version 0.1.0 wrote it."""


def average_name(parameter: str) -> str:
    """Return the name that the average of a parameter has in a checkpoint."""
    return f"{AVERAGE}.{WEIGHTS}.{parameter}"


def has_average(step: str) -> bool:
    """Return whether a checkpoint's folder has an average; raise ValueError if it is damaged."""
    return safe_load.has_state(step, f"{AVERAGE}.{WEIGHTS}")


def states_to_save(average: Stateful, decay: float) -> dict[str, Any]:
    """Return the states of an average in a checkpoint."""
    return {AVERAGE: average, DECAY: json.dumps([[decay, 1]])}


def read_decay(step: str, default: float) -> float:
    """Read the `ema.decay` of the average in a checkpoint's folder, or the default.

    Raises:
        ValueError: one line; the checkpoint is damaged.
    """
    if DECAY not in safe_load.read_metadata(step).state_dict_metadata:
        return default
    state = {DECAY: ""}
    try:
        safe_load.load(state, step, no_dist=True)
        decay: float | None = json.loads(state[DECAY])[-1][0]
        if decay is not None and not 0 <= decay < 1:
            raise ValueError("it is not at least 0 and below 1")
    except (CheckpointException, Exception) as error:  # the first is a BaseException only
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the ema.decay in {step} cannot be read: {reason}") from error
    return default if decay is None else decay
