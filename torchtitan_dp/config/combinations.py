"""Checks of `[rope]`, and of the settings of `[data]` by which samples are made of units."""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.gradients.methods import METHODS


def check_rope(config: JobConfig) -> None:
    """Refuse keys that are missing, without effect, or do not go together.

    Raises:
        ValueError: one line that names the key, its value and the remedy.
    """
    rope = config.rope
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
    if taken["factor"] and rope.factor is None:
        raise ValueError(
            f"rope.factor = None: rope.type = '{rope.type}' needs a number of 1 or more: "
            "the new window divided by the trained one"
        )
    if rope.type != "yarn":
        return
    original, fast, slow = (
        rope.original_max_position_embeddings,
        32.0 if rope.beta_fast is None else rope.beta_fast,
        1.0 if rope.beta_slow is None else rope.beta_slow,
    )
    if original is None:
        raise ValueError(
            "rope.original_max_position_embeddings = None: rope.type = 'yarn' needs the "
            "trained window, before any scaling (8192 for Llama 3 and 3.1, 32768 for Qwen3)"
        )
    if slow > fast:
        raise ValueError(
            f"rope.beta_fast = {fast:g} with rope.beta_slow = {slow:g}: the first must be at "
            "least the second (32 and 1, say)"
        )


def check_samples(config: JobConfig) -> None:
    """Refuse settings by which a unit has no sample, or not as many.

    Raises:
        ValueError: one line for the user, that names the key, its value and the remedy.
    """
    _check_answers(config)
    _check_windows(config)


def _check_answers(config: JobConfig) -> None:
    """Refuse fields of prompts or chats that are empty or exclude each other."""
    data = config.data
    for key in ("prompt_field", "messages_field"):
        field = getattr(data, key)
        if field is None:
            continue
        if field == "":
            raise ValueError(f"data.{key} = '': name the JSON field, or remove it")
        if data.long_records == "window":
            raise ValueError(
                f"data.long_records = 'window': with data.{key} a sample lies around the answer; "
                "set it to 'head'"
            )
    if data.prompt_field is not None and data.messages_field is not None:
        raise ValueError(
            f"data.messages_field = '{data.messages_field}': a record has either messages or a "
            f"prompt (data.prompt_field = '{data.prompt_field}'); remove one of the two"
        )
    if data.prompt_field is not None and data.prompt_field == data.text_field:
        raise ValueError(
            f"data.prompt_field = '{data.prompt_field}': it is data.text_field, the field of the "
            "answer; name another field"
        )


def _check_windows(config: JobConfig) -> None:
    """Refuse several windows per draw where a unit has one, or the method cannot average them."""
    data, method = config.data, config.privacy.gradient_method
    count = data.windows_per_draw
    if count == 1:
        return
    if not config.privacy.enable:
        why = "without privacy no unit is drawn; set it to 1"
    elif data.unit_sampling == "concat" and data.long_records == "head":
        why = (
            "each unit has one sample; set data.long_records = 'window', or, with data.unit_field, "
            "data.unit_sampling = 'random'"
        )
    elif method in METHODS and not METHODS[method].averages_windows:
        why = (
            f"privacy.gradient_method = '{method}' clips the gradient of one backward pass; set it "
            "to 'microbatch', which takes any training.local_batch_size"
        )
    else:
        return
    raise ValueError(f"data.windows_per_draw = {count}: {why}")
