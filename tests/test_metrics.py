"""What of TorchTitan's log is left out, and that TorchTitan still says it so."""

import inspect
import logging

import pytest

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan import train
from torchtitan.tools.utils import Color

from torchtitan_dp.metrics import is_true


def shown(message: str) -> bool:
    return is_true(logging.LogRecord("root", logging.INFO, "", 0, message, None, None))


@pytest.mark.parametrize(
    "message",
    [
        'Building llama3 1Bwith {\n  "dim": 64\n}',
        f"{Color.blue}Model llama3 1B {Color.red}size: 963,456 total parameters{Color.reset}",
        "Model llama3 1B size: 963,456 total parameters",
        "Trainer is initialized with local batch size 1, global batch size 1, gradient "
        "accumulation steps 1",
    ],
)
def test_what_is_untrue_of_our_runs_is_left_out(message: str) -> None:
    assert not shown(message)


def test_all_else_is_shown() -> None:
    for message in ("model: 963,456 parameters", "Training starts at step 4", "Building index"):
        assert shown(message)


def test_torchtitan_says_it_in_these_words() -> None:
    """In another release these lines may have gone, or be right."""
    source = inspect.getsource(train.Trainer.__init__)
    for words in (
        'f"Building {job_config.model.name} {job_config.model.flavor}"\n'
        '            f"with {json.dumps(',
        'Model {job_config.model.name} {job_config.model.flavor} "\n'
        '            f"{color.red}size: ',
        '"Trainer is initialized with "',
    ):
        assert words in source, words
