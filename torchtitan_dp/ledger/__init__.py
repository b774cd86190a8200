"""What a run has spent: kept in its checkpoints, in `privacy.json` and in `steps_executed.log`.

`lineage` says on what terms steps were taken, `starts` which step is which, `files` what lies on
disk, `account` what is spent, `initial` what initial weights bring along, `terms` on what terms a
run trains;
`python -m torchtitan_dp.ledger RUN…` verifies runs and adds them up.
"""

from torchtitan_dp.ledger.account import Account, summary, versions
from torchtitan_dp.ledger.files import (
    EXECUTED_FILE,
    FINGERPRINT_FILE,
    PRIVACY_FILE,
    ExecutedSteps,
    check_fingerprint,
    read_published,
    write_atomically,
    write_fingerprint,
)
from torchtitan_dp.ledger.lineage import Budget, Ledger, Segment, Settings

__all__ = [
    "EXECUTED_FILE",
    "FINGERPRINT_FILE",
    "PRIVACY_FILE",
    "Account",
    "Budget",
    "ExecutedSteps",
    "Ledger",
    "Segment",
    "Settings",
    "check_fingerprint",
    "read_published",
    "summary",
    "versions",
    "write_atomically",
    "write_fingerprint",
]
