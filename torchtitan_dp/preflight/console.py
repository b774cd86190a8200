"""The console of a run: our lines, TorchTitan's step lines, warnings that need action, and notices
to the owner of the records, printed once, by the plan or by the start.

`LOGLEVEL=DEBUG` in the environment shows all lines (the variable is torchrun's). Errors and all
other warnings pass in any case.
"""

import logging
import os
import re
import sys
import warnings
from pathlib import Path

import torchtitan

from torchtitan_dp.config import JobConfig, Privacy
from torchtitan_dp.config.derived import never_trained, unit_word
from torchtitan_dp.data.console import say, warn
from torchtitan_dp.data.dataset import describe
from torchtitan_dp.data.prepare import Source
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.preflight.check import Checked

_TORCHTITAN = str(Path(torchtitan.__file__).parent) + os.sep  # installed beside torchtitan_dp
# Of TorchTitan's own lines at the level of information; our trainer logs steps itself, a run
# without privacy leaves that to TorchTitan.
_SHOWN = re.compile(
    r"(\x1b\[\S*?m)?(step: |Training starts|(Loading|Saving|Finished saving) the checkpoint)"
)
_NOTHING_TO_DO = (
    r"ENV\[TORCH_NCCL_ASYNC_ERROR_HANDLING\]",  # set by torchrun, and overridden on purpose
    r"checkpoint\.initial_load_in_hf is True but",  # of every resume, which is what is wanted
    r"torch\.distributed is already initialized\.",  # by an audit, which starts several trainers
)
_WARNINGS = (
    "DTensor random operators may not have complete support",  # no generator of DTensor's is used
    r"DTensor manual_seed\(\) may not have complete support",
    "Set timeout is now only supported for either nccl or gloo",  # of groups that have no backend
    "In CPU autocast, but the target dtype is not supported",  # fp32 needs none
)


def quiet(logger: logging.Logger) -> None:
    """Hide lines of TorchTitan's logger and warnings of libraries that need no action."""
    if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        return
    logger.addFilter(is_shown)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def is_shown(record: logging.LogRecord) -> bool:
    """Return whether a line is shown: a filter for `logging`."""
    message = record.getMessage()
    if record.levelno > logging.INFO:
        return not any(re.match(pattern, message) for pattern in _NOTHING_TO_DO)
    return not record.pathname.startswith(_TORCHTITAN) or bool(_SHOWN.match(message))


def show_notices(config: JobConfig, checked: Checked) -> None:
    """Print warnings of the records and notices of the configuration, as a plan does."""
    show_records(config, checked)
    for line in tokenizer_lines(config, checked.records.source) + notices(config):
        print(f"      {line}", file=sys.stderr)


def show_records(config: JobConfig, checked: Checked) -> None:
    """Print what is known of the records, labelled not private."""
    for warning in checked.records.warnings:
        warn(warning)
    if checked.records.fingerprint:  # else they are none, but a number
        for line in describe(checked.records.figures(checked.samples), unit_word(config)):
            say(line)


def notices(config: JobConfig) -> list[str]:
    """List the notices of the configuration."""
    lines = [never_trained(config), _beyond_the_window(config)]
    return [line for line in lines if line is not None] + _without_effect(config)


def tokenizer_lines(config: JobConfig, source: Source) -> list[str]:
    """Describe the tokenizer, and samples whose end is never learned."""
    where, reading = config.model.hf_assets_path, source.reading
    end = None
    if reading.template is not None:
        end = reading.template.lacks_end
    elif source.tokenizer.eos_id is None:
        end = "the tokenizer has no eos: the model never learns to stop"
    named = f"tokenizer: {source.tokenizer.describe()}" + (f", from {where}" if where else "")
    return [named, *filter(None, [end])]


def _without_effect(config: JobConfig) -> list[str]:
    """Describe the settings of `[privacy]` that another gradient method would read."""
    privacy, default = config.privacy, Privacy()
    if not privacy.enable:
        return []
    taken = METHODS[privacy.gradient_method].own_settings
    keys = {key for method in METHODS.values() for key in method.own_settings if key not in taken}
    return [
        f"privacy.{key} = {repr(getattr(privacy, key)).lower()} has no effect with "  # as in TOML
        f"privacy.gradient_method = '{privacy.gradient_method}'"
        for key in sorted(keys)
        if getattr(privacy, key) != getattr(default, key)
    ]


def _beyond_the_window(config: JobConfig) -> str | None:
    """Describe samples that are longer than the model's window; None if none are."""
    window, length = shape(config).max_seq_len, config.training.seq_len
    if length <= window:
        return None
    return (
        f"training.seq_len = {length:,} is beyond the {window:,} positions of the model "
        "(max_position_embeddings); [rope] extends them"
    )
