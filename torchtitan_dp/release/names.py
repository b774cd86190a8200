"""The names that a release's owner gives, which its card and `adapter_config.json` publish."""

import re
from dataclasses import dataclass

from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.hugging_face import config_file, read_settings
from torchtitan_dp.models.local_paths import is_local_path

_OF_THE_HUB = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)  # a model or a data set
_LICENSE = re.compile(r"[a-z][a-z0-9.+-]*", re.ASCII)
_NOT_TEXT_IN_YAML = re.compile(r"\d[^/]*|null|true|false|yes|no|on|off|y|n", re.IGNORECASE)


@dataclass(frozen=True)
class PublicNames:
    """Names to publish; what is None or empty, the card leaves to fill in."""

    base_model: str | None = None
    """The model that training started from, on Hugging Face's hub."""
    license: str | None = None
    """The identifier of a license, as Hugging Face's hub lists them."""
    datasets: tuple[str, ...] = ()
    """The data sets of the records, on Hugging Face's hub."""
    unit_name: str | None = None
    """A word for a unit, in the place of "unit" or "record"."""

    def check(self) -> None:
        """Raise ValueError, one line, for what would publish a path or break the card."""
        if self.base_model is not None:
            _check_of_the_hub("--base_model", self.base_model, "model", "meta-llama/Llama-3.2-1B")
        for name in self.datasets:
            _check_of_the_hub("--datasets", name, "data set", "HuggingFaceFW/fineweb-edu")
        if self.license is not None and not _is_name(_LICENSE, self.license):
            raise ValueError(
                f"--license = '{self.license}': must be an identifier of Hugging Face's list of "
                "licenses, such as apache-2.0, llama3.2 or other"
            )
        if self.unit_name is not None and not self.unit_name.isalpha():
            raise ValueError(
                f"--unit_name = '{self.unit_name}': must be one word in the singular, such as "
                "patient"
            )


NO_NAMES = PublicNames()


def name_in_config(config: JobConfig) -> str | None:
    """Find the name that the starting model's `config.json` notes, if it looks like a hub's.

    It is not published unasked: `transformers` notes the place a model was loaded from, and a
    relative path looks like a name.
    """
    source = config_file(config) if config.checkpoint.initial_load_in_hf else None
    name = None if source is None else read_settings(*source).get("_name_or_path")
    if not isinstance(name, str) or "/" not in name or is_local_path(name):
        return None
    return name if _is_name(_OF_THE_HUB, name) else None


def _check_of_the_hub(option: str, name: str, kind: str, example: str) -> None:
    if not _is_name(_OF_THE_HUB, name):
        raise ValueError(
            f"{option} = '{name}': it would be published, and is not a name on Hugging Face's "
            f"hub; give the one under which others find the {kind}, such as {example}"
        )


def _is_name(pattern: re.Pattern[str], name: str) -> bool:
    return bool(pattern.fullmatch(name)) and not _NOT_TEXT_IN_YAML.fullmatch(name)
