"""What a configuration's privacy unit is called, and what of its records is learned."""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.units import word


def unit_word(config: JobConfig) -> str:
    """Call what is drawn, clipped and protected by its name, in a word."""
    return word(config.data.unit_field)


def resolve_sampling(config: JobConfig) -> None:
    """Make `auto` the way to take samples that it stands for, in place.

    What is grouped is read whole over many draws, since most units have more than a sample: by
    windows, or, where answers decide what is read of a record, by taking records in turn.
    """
    data = config.data
    has_answers = data.prompt_field is not None or data.messages_field is not None
    is_grouped = data.unit_field is not None
    if data.unit_sampling == "auto":
        data.unit_sampling = "random" if is_grouped and has_answers else "concat"
    if data.long_records == "auto":
        data.long_records = "window" if is_grouped and not has_answers else "head"


def never_trained(config: JobConfig) -> str | None:
    """Say what of a long record or unit no sample is made of; None where every part may be."""
    data = config.data
    takes_all = data.unit_field is not None and data.unit_sampling == "concat"
    has_answers = data.prompt_field is not None or data.messages_field is not None
    if data.long_records != "head" or (has_answers and not takes_all):
        return None  # with answers, a sample of one record lies where the answer is
    remedy = "data.long_records = 'window' draws a random part each time"
    if has_answers:
        remedy = "data.unit_sampling = 'random' draws a random record each time"
    return (
        f"only the first {config.training.seq_len:,} tokens of a "
        f"{'unit' if takes_all else 'record'} are trained on; {remedy}"
    )


def privacy_unit(config: JobConfig) -> str:
    """Name the unit as `privacy.json` does, behind "one"."""
    field = config.data.unit_field
    return "record" if field is None else f"unit of data.unit_field '{field}'"


def targets(config: JobConfig) -> str:
    """Say which tokens of a record the loss is the mean of, as `privacy.json` does."""
    data = config.data
    if data.messages_field is not None:
        return f"the assistant's turns in data.messages_field '{data.messages_field}'"
    if data.prompt_field is not None:
        return (
            f"the answer in data.text_field '{data.text_field}', after the prompt in "
            f"data.prompt_field '{data.prompt_field}'"
        )
    return "every token"
