"""The keys of `[rope]`: combinations that cannot work are refused; the rest, as a term in words."""

import dataclasses
import math

from torchtitan_dp.config import JobConfig

AS_GIVEN = "as given"


def check_rope(config: JobConfig) -> None:
    """Refuse keys that are out of range, missing, or without effect.

    Raises:
        ValueError: one line that names the key, its value and the remedy.
    """
    rope = config.rope
    if rope.theta is not None and not 1 < rope.theta < math.inf:
        raise ValueError(f"rope.theta = {rope.theta}: must be a number above 1 (500000.0, say)")
    taken = {
        "factor": rope.type in ("linear", "yarn"),
        "original_max_position_embeddings": rope.type == "yarn",
        "beta_fast": rope.type == "yarn",
        "beta_slow": rope.type == "yarn",
    }
    for key, is_taken in taken.items():
        value = getattr(rope, key)
        if value is not None and not is_taken:
            kind = "unset" if rope.type is None else f"'{rope.type}'"
            raise ValueError(
                f"rope.{key} = {value}: has no effect with rope.type {kind}; set rope.type = "
                "'yarn', or remove it"
            )
    if taken["factor"] and (rope.factor is None or not 1 <= rope.factor < math.inf):
        raise ValueError(
            f"rope.factor = {rope.factor}: rope.type = '{rope.type}' needs a number of 1 or more: "
            "the new window divided by the trained one"
        )
    if rope.type != "yarn":
        return
    original, fast, slow = (
        rope.original_max_position_embeddings,
        32.0 if rope.beta_fast is None else rope.beta_fast,
        1.0 if rope.beta_slow is None else rope.beta_slow,
    )
    if original is None or original < 1:
        raise ValueError(
            f"rope.original_max_position_embeddings = {original}: rope.type = 'yarn' needs the "
            "trained window, before any scaling (8192 for Llama 3 and 3.1, 32768 for Qwen3)"
        )
    if not 0 < slow <= fast < math.inf:
        raise ValueError(
            f"rope.beta_fast = {fast:g} with rope.beta_slow = {slow:g}: both must be above 0, and "
            "the first at least the second (32 and 1, say)"
        )


def rope_in_words(config: JobConfig) -> str:
    """Describe what `[rope]` changes, for `privacy.json`, which a resume compares."""
    keys = dataclasses.asdict(config.rope).items()
    return ", ".join(f"{key} {value}" for key, value in keys if value is not None) or AS_GIVEN
