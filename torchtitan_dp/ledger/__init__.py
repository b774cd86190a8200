"""What a run has spent: kept in its checkpoints, in `privacy.json` and in `steps_executed.log`.

Words, as they are used here and in the documentation:
    record: One file, or one line of a JSON Lines file.
    unit: What epsilon protects, which is one record or all records of one person or owner.
    draw: The units that one step trains on, each taken with the same probability.
    begun step: A step whose line is in the log, since its update was about to happen.
    executed step: The same as a begun step, as `privacy.json` calls it.
    start: One time that the trainer starts or loads a checkpoint, under a random secret name.
    lineage: The steps that made some weights, without those of starts whose weights were lost.
    segment: Steps of a lineage that were taken one after the other on the same terms.
    step name: A random public name of one step, which does not show the start that took it.
    lost step: A begun step that is not of the lineage, since a crash or a branch abandoned it.
    ancestor: A run that initial weights come from, with the steps that made them.

Of a segment an accountant needs noise, rate and number of steps (`privacy.segments.Segment`), while
`RunSegment` has all of its terms.

Modules, from the bottom: `settings` (the terms of steps), `steps` (which step is which), `lineage`
(the `Ledger`), `json_types`, `schema` (the keys of `privacy.json`), `caveats` (what epsilon rests
on), `executed` (the private logs), `files` (`privacy.json` and the fingerprint), `program` (what
trained), `account` (what is spent and published),
`baseline` (runs without privacy), `initial` (what initial weights bring along), `terms` (the plan
of a run), `runs` (what several runs spend) and `reference` (the documentation of `schema`).
`python -m torchtitan_dp.ledger RUN…` verifies runs and adds them up.
"""

from torchtitan_dp.ledger.account import Account, summary
from torchtitan_dp.ledger.executed import EXECUTED_FILE, STARTS_FILE, ExecutedSteps
from torchtitan_dp.ledger.files import (
    FINGERPRINT_FILE,
    PRIVACY_FILE,
    check_fingerprint,
    read_published,
    write_fingerprint,
)
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.program import versions
from torchtitan_dp.ledger.settings import RunSegment, Settings

__all__ = [
    "EXECUTED_FILE",
    "FINGERPRINT_FILE",
    "PRIVACY_FILE",
    "STARTS_FILE",
    "Account",
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
