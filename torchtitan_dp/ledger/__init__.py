"""What a run has spent: kept in its checkpoints, in `privacy.json` and in `steps_executed.log`.

`settings` are the terms of a step, `lineage` says which steps were taken on which, `starts` which
step is which, `schema` what `privacy.json` holds, `files` what lies on disk, `account` what is
spent, `caveats` what that rests on, `initial` what initial weights bring along, `terms` on what
terms a run trains, `program` which program it is;
`python -m torchtitan_dp.ledger RUN…` verifies runs and adds them up.
"""

from torchtitan_dp.ledger.account import Account, summary
from torchtitan_dp.ledger.files import (
    EXECUTED_FILE,
    FINGERPRINT_FILE,
    PRIVACY_FILE,
    ExecutedSteps,
    check_fingerprint,
    read_published,
    write_fingerprint,
)
from torchtitan_dp.ledger.lineage import Budget, Ledger
from torchtitan_dp.ledger.program import versions
from torchtitan_dp.ledger.settings import RunSegment, Settings

__all__ = [
    "EXECUTED_FILE",
    "FINGERPRINT_FILE",
    "PRIVACY_FILE",
    "Account",
    "Budget",
    "ExecutedSteps",
    "Ledger",
    "RunSegment",
    "Settings",
    "check_fingerprint",
    "read_published",
    "summary",
    "versions",
    "write_fingerprint",
]
