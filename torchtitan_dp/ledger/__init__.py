"""What a run has spent: kept in its checkpoints, in `privacy.json` and in `steps_executed.log`.

Nouns of this room, also in the documentation:
    mechanism: What one step does to privacy (`privacy.segments`).
    settings: The terms that all steps of a run are taken on: mechanism, unit, delta and the rest.
    start: One time that the trainer starts or loads a checkpoint, under a random secret name.
    step name: A random public name of one step, which does not show the start that took it.
    executed step: A step whose line is in the log, written just before its update.
    lineage: The steps that made some weights, without those of starts whose weights were lost.
    ledger: The value `Lineage`: a lineage, its settings, and the marks that weights keep.
    lost step: An executed step that is not of the lineage, since a crash or a branch abandoned it.
    ancestor: A run that initial weights come from, with the steps that made them.

Modules, from the bottom: `settings` (terms, and which step is which), `lineage` (a frozen value,
and what follows from it), `spending` (its epsilon, and the assumptions under it), `schema` (the
keys of `privacy.json`), `log` (the private logs), `files` (`privacy.json` and the fingerprint of
the records), `account` (the spending while training, as published) and `runs` (the sum over several
runs). Configurations are read one floor above, in `checkpoint.terms` and `checkpoint.plan`.
`python -m torchtitan_dp.ledger RUN…` verifies runs and adds them up.
"""

from torchtitan_dp.ledger.account import Account as Account
from torchtitan_dp.ledger.account import summary as summary
from torchtitan_dp.ledger.account import versions as versions
from torchtitan_dp.ledger.files import FINGERPRINT_FILE as FINGERPRINT_FILE
from torchtitan_dp.ledger.files import PRIVACY_FILE as PRIVACY_FILE
from torchtitan_dp.ledger.files import check_fingerprint as check_fingerprint
from torchtitan_dp.ledger.files import read_published as read_published
from torchtitan_dp.ledger.files import write_fingerprint as write_fingerprint
from torchtitan_dp.ledger.lineage import Lineage as Lineage
from torchtitan_dp.ledger.log import EXECUTED_FILE as EXECUTED_FILE
from torchtitan_dp.ledger.log import STARTS_FILE as STARTS_FILE
from torchtitan_dp.ledger.log import Losable as Losable
from torchtitan_dp.ledger.log import RunLog as RunLog
from torchtitan_dp.ledger.settings import Settings as Settings
