"""Keeps the console to our lines and TorchTitan's step lines: drops what is untrue or of no use.

Each entry names its line and the reason. Errors, and warnings that match no entry, pass.
"""

import logging
import re
import warnings

_UNTRUE = {
    r"(\x1b\[\S+m)?Model \S+ \S+ (\x1b\[\S+m)?size: ": "a `config.json` has its own size",
    r"Trainer is initialized with ": "the global batch size is an expectation",
    r"Peak FLOPS used for computing MFU: inf": "no peak is known on the CPU",
    r"Mixed precision training is handled by AMP": "weights stay in `training.dtype`",
    r"checkpoint\.initial_load_in_hf is True but ": "resuming from own checkpoints is intended",
    r"ENV\[TORCH_NCCL_ASYNC_ERROR_HANDLING\] = 1 will ": "TorchTitan's own setting",
}
_DETAILS = {  # shown at the debug level
    r"Building \S+ \S*with \{": "the model's dictionary; our line `model:` has the facts",
    r"Building device mesh with ": "one degree a line in the configuration",
    r"Successfully created meshes ": "follows from the configuration",
    r"\[GC\] ": "TorchTitan collects garbage on its own schedule",
    r"Applied \w[\w ]* to the model": "follows from the configuration",
    r"Mixed precision training is handled by fully_shard": "follows from the configuration",
    r"TensorBoard logging enabled": "our line `to watch` has the folder",
    r"Checkpointing active": "printed once a build; our lines name the folder",
    r"CPU memory usage for model: ": "the step lines have the memory",
    r"Destroying the purge thread": "a checkpointer was replaced by ours",
    r"Synchronizing and adjusting timeout ": "`comm.train_timeout_seconds`",
    r"Sleeping 2 seconds for other ranks ": "TorchTitan's way to end",
}
_LIBRARY_WARNINGS = {
    r"DTensor random operators may not have ": "noise and weights come from our generators",
    r"DTensor manual_seed\(\) may not have ": "noise and weights come from our generators",
    r"Set timeout is now only supported for ": "TorchTitan sets it for the default group too",
}
_DROPPED = re.compile("|".join(_UNTRUE))
_DEBUG = re.compile("|".join(_DETAILS))


def tidy(record: logging.LogRecord) -> bool:
    """Drop untrue lines and move details to the debug level: a filter for `logging`.

    Lines of level ERROR and above pass as they are.
    """
    if record.levelno >= logging.ERROR:
        return True
    message = record.getMessage()
    if _DROPPED.match(message):
        return False
    if _DEBUG.match(message):
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"  # handlers compare it again
    return True


def silence(logger: logging.Logger) -> None:
    """Filter a logger, and ignore library warnings that a user can do nothing about."""
    logger.addFilter(tidy)
    for message in _LIBRARY_WARNINGS:
        warnings.filterwarnings("ignore", message, UserWarning)
