"""Notices to the owner of the records, printed by the plan and at the start of a run.

Notices that depend on records go through `data.console`, which labels them. The others follow from
the configuration.
"""

import sys

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.units import never_trained
from torchtitan_dp.data.console import warn
from torchtitan_dp.data.index import writable_folder
from torchtitan_dp.data.opening import Records


def show(config: JobConfig, records: Records) -> None:
    """Print warnings about unreadable records, and the configuration's notices."""
    for warning in records.warnings:
        warn(warning)
    for line in notices(config):
        print(f"      {line}", file=sys.stderr)


def notices(config: JobConfig) -> list[str]:
    """List the parts of records that are never trained on, and the folder of cached token ids."""
    lines = []
    if (unread := never_trained(config)) is not None:
        lines.append(unread)
    if config.data.token_cache:
        lines.append(
            f"token ids of drawn records are cached in {writable_folder(None)} (private; "
            "data.token_cache = false disables it)"
        )
    return lines
