"""Which lines of a run's console are shown."""

import inspect
import logging
from pathlib import Path

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
import torchtitan.components.checkpoint
import torchtitan.distributed.utils
import torchtitan.tools.utils
import torchtitan.train
from torchtitan.tools.utils import Color

from torchtitan_dp.train.spec import _NOTHING_TO_DO, is_shown

OURS = "torchtitan_dp/train/processor.py"
THEIRS = torchtitan.train.__file__


def shown(message: str, path: str = THEIRS, level: int = logging.INFO) -> bool:
    return is_shown(logging.LogRecord("root", level, path, 0, message, None, None))


def test_steps_and_all_lines_of_ours_are_shown() -> None:
    assert shown("model: 963,456 parameters", OURS)
    assert shown("step: 12  epsilon: 3.1", OURS)
    # Installed from a wheel, both lie in one folder.
    assert shown("done: 12 steps", f"{Path(torchtitan.__file__).parent}_dp/train.py")
    assert shown("Training starts at step 4")
    assert shown("Finished saving the checkpoint (or staging if async is enabled)in 0.14 seconds.")
    assert shown(f"{Color.red}step: 12  loss: 3.1")  # of a run without privacy


def test_warnings_and_errors_are_shown_but_for_four_whose_words_these_are() -> None:
    assert shown("3 CUDA memory allocation retries.", level=logging.WARNING)
    assert shown("ENV[OTHER] = 1 will be overridden", level=logging.WARNING)
    assert shown("failed", level=logging.ERROR)
    overridden = "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 1 will be overridden to 3 based on"
    resumed = "checkpoint.initial_load_in_hf is True but the checkpoint.folder"
    again = "torch.distributed is already initialized. Skipping init_distributed."
    peak = "Error running lspci: "
    for hidden in (overridden, f"{resumed} exists. ", again, f"{peak}[Errno 2] No such file"):
        assert not shown(hidden, level=logging.WARNING)
    assert resumed in inspect.getsource(torchtitan.components.checkpoint)
    assert again in inspect.getsource(torchtitan.distributed.utils)
    assert f'f"{peak}' in inspect.getsource(torchtitan.tools.utils)
    assert "_set_pg_timeout(" in inspect.getsource(torchtitan.distributed.utils)  # a FutureWarning
    assert len(_NOTHING_TO_DO) == 4
