"""Notices to the owner of the records before a run: printed once, by the plan or by the start.

Those that depend on records go through `data.console`, which labels them.
"""

import os
import sys

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import never_trained
from torchtitan_dp.data.console import warn
from torchtitan_dp.data.dataset import Records
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
    unread = never_trained(config)
    return [] if unread is None else [unread]
