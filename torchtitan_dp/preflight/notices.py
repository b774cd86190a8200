"""What the owner of the records should know of a run before it starts: printed by plan and start.

What depends on records goes through `data.console`, which labels it. The rest follows from the
configuration.
"""

import sys

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.units import never_trained
from torchtitan_dp.data.console import warn
from torchtitan_dp.data.index import writable_folder
from torchtitan_dp.data.opening import Records


def show(config: JobConfig, records: Records) -> None:
    """Print warnings of records that read as nothing, and where samples come from and go to."""
    for warning in records.warnings:
        warn(warning)
    for line in notices(config):
        print(f"      {line}", file=sys.stderr)


def notices(config: JobConfig) -> list[str]:
    """List what is never trained on, and where token ids are written."""
    lines = []
    if (unread := never_trained(config)) is not None:
        lines.append(unread)
    if config.data.token_cache:
        lines.append(
            f"token ids of the records that are drawn are written to {writable_folder(None)} "
            "(data.token_cache = false writes none)"
        )
    return lines
