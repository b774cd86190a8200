"""What a run has spent: kept in its checkpoints, in `privacy.json` and in private logs.

Nouns of this room, also in the documentation:
    mechanism: What one step does to privacy (`privacy.segments`).
    settings: The terms that all steps of a run are taken on: mechanism, unit, delta and the rest.
    start: One time that the trainer starts to train, under a random secret name.
    executed step: A step whose line is in the log, written just before its update.
    lineage: The steps that made some weights, without those of starts whose weights were lost.
    ledger: The value `Lineage`: a lineage, its settings, and the marks that weights keep.
    lost step: An executed step that is not of the lineage, since a crash abandoned it.
    ancestor: A run whose exported weights this one started from; all that it spent counts.

Modules, from the bottom: `lineage` (frozen values), `log` (the private files), `spending` (epsilon,
caveats, the sum over several runs) and `schema` (`privacy.json`). Configurations are read one floor
above, in `checkpoint`. `torchtitan-dp ledger RUN…` verifies runs and adds them up.
"""

from torchtitan_dp.ledger.lineage import Lineage as Lineage
from torchtitan_dp.ledger.lineage import Settings as Settings
from torchtitan_dp.ledger.log import EXECUTED_FILE as EXECUTED_FILE
from torchtitan_dp.ledger.log import STARTS_FILE as STARTS_FILE
from torchtitan_dp.ledger.log import Losable as Losable
from torchtitan_dp.ledger.log import RunLog as RunLog
from torchtitan_dp.ledger.log import check_fingerprint as check_fingerprint
from torchtitan_dp.ledger.log import write_fingerprint as write_fingerprint
from torchtitan_dp.ledger.schema import PRIVACY_FILE as PRIVACY_FILE
from torchtitan_dp.ledger.schema import read_published as read_published
from torchtitan_dp.ledger.schema import summary as summary
