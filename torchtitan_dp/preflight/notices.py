"""What the owner of the records should know of a run before it starts: printed by plan and start.

What depends on records goes through `data.console`, which labels it. The rest follows from the
configuration.
"""

import sys

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.units import never_trained
from torchtitan_dp.data.console import warn
from torchtitan_dp.data.dataset import Records


def show(config: JobConfig, records: Records) -> None:
    """Print warnings of records that read as nothing, and what is never trained on."""
    for warning in records.warnings:
        warn(warning)
    for line in notices(config):
        print(f"      {line}", file=sys.stderr)


def notices(config: JobConfig) -> list[str]:
    """List what is never trained on."""
    unread = never_trained(config)
    return [] if unread is None else [unread]
