"""Notices to the owner of the records before a run: printed once, by the plan or by the start.

Those that depend on records go through `data.console`, which labels them.
"""

import os
import sys

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import never_trained
from torchtitan_dp.data.console import warn
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.process import PLANNED


def show(config: JobConfig, records: Records) -> None:
    """Print notices of empty or never trained records, unless a plan did."""
    if PLANNED in os.environ:
        return
    for warning in records.warnings:
        warn(warning)
    for line in notices(config):
        print(f"      {line}", file=sys.stderr)


def notices(config: JobConfig) -> list[str]:
    """List the notices of the configuration."""
    lines = [never_trained(config), _beyond_the_window(config)]
    return [line for line in lines if line is not None]


def _beyond_the_window(config: JobConfig) -> str | None:
    """Describe samples that are longer than the model's window; None if none are."""
    window, length = shape(config).max_seq_len, config.training.seq_len
    if length <= window:
        return None
    return (
        f"training.seq_len = {length:,} is beyond the {window:,} positions of the model "
        "(max_position_embeddings); [rope] extends them"
    )
