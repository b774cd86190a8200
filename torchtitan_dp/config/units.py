"""What a configuration's privacy unit is called."""

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.units import word


def unit_word(config: JobConfig) -> str:
    """Call what is drawn, clipped and protected by its name, in a word."""
    return word(config.data.unit_field)


def privacy_unit(config: JobConfig) -> str:
    """Name the unit as `privacy.json` does, behind "one"."""
    field = config.data.unit_field
    return "record" if field is None else f"unit of data.unit_field '{field}'"
