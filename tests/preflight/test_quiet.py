"""Lines of TorchTitan and of libraries that stay off the console, and those that must pass."""

import inspect
import logging
import warnings

import pytest

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan import train
from torchtitan.components import checkpoint
from torchtitan.distributed import utils
from torchtitan.tools.utils import Color

from torchtitan_dp.preflight.quiet import silence


@pytest.fixture
def shown():
    """Levels of the lines that a handler at INFO has received, by their text."""
    logger, lines = logging.Logger("console", logging.INFO), {}
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.update({record.getMessage(): record.levelname})
    logger.addHandler(handler)
    with warnings.catch_warnings():
        silence(logger)
        yield logger, lines


@pytest.mark.parametrize(
    "message",
    [
        'Building llama3 1Bwith {\n  "dim": 64\n}',
        f"{Color.blue}Model llama3 1B {Color.red}size: 963,456 total parameters{Color.reset}",
        "Model llama3 1B size: 963,456 total parameters",
        "Trainer is initialized with local batch size 1, global batch size 1, gradient "
        "accumulation steps 1",
        "Peak FLOPS used for computing MFU: inf",
        "Mixed precision training is handled by AMP",
        "checkpoint.initial_load_in_hf is True but the checkpoint.folder exists.",
    ],
)
def test_misleading_lines_and_details_are_dropped(shown, message):
    logger, lines = shown
    logger.info(message)
    assert not lines


def test_the_models_dictionary_is_at_the_debug_level(shown):
    logger, lines = shown
    logger.handlers[0].setLevel(logging.DEBUG)
    logger.info("Building llama3 1Bwith {}")
    assert set(lines.values()) == {"DEBUG"}


@pytest.mark.parametrize(
    "message",
    [
        "model: 963,456 parameters",
        "Training starts at step 4",
        "Building index",
        "Peak FLOPS used for computing MFU: 9.890e+14",
        "Warmup (3) + decay (2) steps exceed total steps (3). Adjusting decay steps to 0.",
        "Saving the checkpoint (or staging if async is enabled).",
    ],
)
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_lines_that_matter_pass(shown, message, level):
    logger, lines = shown
    logger.log(level, message)
    assert lines == {message: logging.getLevelName(level)}


def test_errors_pass_in_any_words(shown):
    logger, lines = shown
    for message in ("Trainer is initialized with nothing", "[GC] failed"):
        logger.error(message)
    assert len(lines) == 2


def test_library_warnings_are_ignored_by_name_alone(shown):
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("DTensor manual_seed() may not have complete support on x", stacklevel=1)
        assert not seen
        warnings.warn("DTensor lost a value", stacklevel=1)
    assert [str(one.message) for one in seen] == ["DTensor lost a value"]


def test_torchtitan_has_these_words():
    """In another release these lines may have gone, or be right."""
    source = inspect.getsource(train.Trainer.__init__)
    for words in (
        'f"Building {job_config.model.name} {job_config.model.flavor}"\n'
        '            f"with {json.dumps(',
        'Model {job_config.model.name} {job_config.model.flavor} "\n'
        '            f"{color.red}size: ',
        '"Trainer is initialized with "',
        "Peak FLOPS used for computing MFU: ",
    ):
        assert words in source, words
    assert "Mixed precision training is handled by AMP" in inspect.getsource(utils)
    assert "checkpoint.initial_load_in_hf is True but " in inspect.getsource(checkpoint)
