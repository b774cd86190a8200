"""What a configuration's privacy unit is called, and what of its records is learned."""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.units import word


def unit_word(config: JobConfig) -> str:
    """Call what is drawn, clipped and protected by its name, in a word."""
    return word(config.data.unit_field)


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
