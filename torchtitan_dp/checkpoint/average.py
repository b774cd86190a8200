"""The average of weights (`[ema]`) in a checkpoint: under which names, whether one is there, and by
which decays it was made.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_dp.checkpoint import safe_load

AVERAGE = "ema"
"""The state, beside TorchTitan's own, that holds it."""

WEIGHTS = "weights"
"""Its part that holds one average a trained parameter, by the parameter's name."""

DECAYS = "decays"
"""Its part that says which decays it was made by; checkpoints of before there was one lack it."""

DECAYS_KEY = f"{AVERAGE}.{DECAYS}"
"""The name that this part has in a checkpoint."""


class Decay(NamedTuple):
    """Say by which `ema.decay` an average follows the weights, from the update of a step on."""

    decay: float | None  # None: it was not recorded
    from_step: int  # counted from 1


UNRECORDED = (Decay(None, 1),)
"""The decays of an average whose checkpoint does not tell them."""


def decays_to_json(decays: Sequence[Decay]) -> str:
    """Write decays as a checkpoint holds them."""
    return json.dumps([list(one) for one in decays])


def decays_from_json(text: str) -> tuple[Decay, ...]:
    """Read what `decays_to_json` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = tuple(
            Decay(None if decay is None else float(decay), int(step))
            for decay, step in json.loads(text)
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"the decays of an average cannot be read: {text[:100]!r}") from error
    steps = [one.from_step for one in found]
    known = [one.decay for one in found if one.decay is not None]
    rising = steps == sorted(set(steps)) and all(step >= 1 for step in steps)
    if not rising or not all(0 <= decay < 1 for decay in known):
        raise ValueError(f"these are no decays of an average: {text[:100]!r}")
    return found


def decays_in_words(decays: Sequence[Decay]) -> str:
    """Write decays for people.

    >>> decays_in_words([Decay(0.99, 1), Decay(0.95, 11)])
    '0.99 until step 10, 0.95 after'
    """
    if not decays:
        return "none yet"
    said = ["not recorded" if one.decay is None else f"{one.decay}" for one in decays]
    if len(said) == 1:
        return said[0]
    until = (f"until step {after.from_step - 1}" for after in decays[1:])
    return ", ".join(map(" ".join, zip(said, (*until, "after"), strict=True)))


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


def has_decays(step: str) -> bool:
    """Tell whether a checkpoint says by which decays its average was made.

    Args:
        step: the checkpoint's own folder.

    Raises:
        ValueError: its metadata is damaged.
    """
    return DECAYS_KEY in safe_load.read_metadata(step).state_dict_metadata


class WithoutDecays:
    """Stands for an average that is loaded from a checkpoint without its decays."""

    def __init__(self, average: Stateful) -> None:
        self._average = average

    def state_dict(self) -> dict[str, Any]:
        """Return what is there to be loaded."""
        held = self._average.state_dict()
        return {name: value for name, value in held.items() if name != DECAYS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand it on, and say that the decays are not known."""
        self._average.load_state_dict({**state_dict, DECAYS: decays_to_json(UNRECORDED)})
