"""The privacy unit of a configuration in words, and the tokens that are trained on."""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.units import word


def unit_word(config: JobConfig) -> str:
    """Return the one-word name of the privacy unit: record, patient, …"""
    return word(config.data.unit_field)


def resolve_sampling(config: JobConfig) -> None:
    """Replace `auto` by the sampling that it stands for, in place.

    Most units are longer than one sample, so over many draws all of a unit is read: by windows,
    or, where samples lie around answers, by random records.
    """
    data = config.data
    has_answers = data.prompt_field is not None or data.messages_field is not None
    is_grouped = data.unit_field is not None
    if data.unit_sampling == "auto":
        data.unit_sampling = "random" if is_grouped and has_answers else "concat"
    if data.long_records == "auto":
        data.long_records = "window" if is_grouped and not has_answers else "head"


def never_trained(config: JobConfig) -> str | None:
    """Describe the part of long records or units that no sample covers; None if there is none."""
    data = config.data
    takes_all = data.unit_field is not None and data.unit_sampling == "concat"
    has_answers = data.prompt_field is not None or data.messages_field is not None
    if data.long_records != "head" or (has_answers and not takes_all):
        return None  # with answers, a sample of one record lies around the answer
    remedy = "data.long_records = 'window' samples a new part at each draw"
    if has_answers:
        remedy = "data.unit_sampling = 'random' samples a new record at each draw"
    return (
        f"only the first {config.training.seq_len:,} tokens of a "
        f"{'unit' if takes_all else 'record'} are trained on; {remedy}"
    )


def privacy_unit(config: JobConfig) -> str:
    """Return the unit's name in `privacy.json`, which follows "one"."""
    field = config.data.unit_field
    return "record" if field is None else f"unit of data.unit_field '{field}'"


def targets(config: JobConfig) -> str:
    """Describe the target tokens of a record, as in `privacy.json`."""
    data = config.data
    if data.messages_field is not None:
        return f"the assistant's turns in data.messages_field '{data.messages_field}'"
    if data.prompt_field is not None:
        return (
            f"the answer in data.text_field '{data.text_field}', after the prompt in "
            f"data.prompt_field '{data.prompt_field}'"
        )
    return "every token"
