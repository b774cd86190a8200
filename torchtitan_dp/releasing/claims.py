"""What may be claimed of a checkpoint: its own ledger, `privacy.json` and the executed steps agree.

Guarantee:
    The returned terms are those of the ledger inside the checkpoint, at every step that the run
    ever began. Disagreement is never settled: it is refused.
"""

import dataclasses
from typing import Any

from torchtitan_dp.ledger import PRIVACY_FILE, Ledger
from torchtitan_dp.ledger.account import versions
from torchtitan_dp.ledger.files import read_published_fields
from torchtitan_dp.ledger.verify import check_checkpoint, verify

PUBLIC_KEYS = (
    "private",
    "epsilon_executed",
    "delta",
    "accountant",
    "noise_multiplier",
    "max_grad_norm",
    "sample_rate",
    "sample_rate_source",
    "steps",
    "steps_executed",
    "expected_batch_size",
    "privacy_unit",
    "neighbouring_relation",
    "caveats",
    "segments",
    "starts",
    "ancestors",
    "budget",
    "adaptive",
    "planned_steps",
    "run",
    "config_hash",
    "versions",
)
"""What a release tells of `privacy.json`. Not `epsilon`, which leaves out lost steps."""


def claims(run: str, checkpoint: str, ledger: Ledger) -> dict[str, Any]:
    """The terms that hold for the weights in the folder `checkpoint`, under `PUBLIC_KEYS`.

    Args:
        run: the folder that holds `privacy.json` and the executed steps.
        checkpoint: named `step-N`.
        ledger: that of the checkpoint.

    Raises:
        ValueError: one line for the user; the run is not private, or its files disagree.
    """
    told = read_published_fields(run)
    if told is None:
        raise ValueError(f"RUN = '{run}': it has no {PRIVACY_FILE}; restore it")
    _refuse_not_private(run, ledger, told)
    step = int(checkpoint.rpartition("-")[2])
    if ledger.steps != step:
        raise ValueError(
            f"{checkpoint}: its ledger counts {ledger.steps} steps; give the folder its name back"
        )
    found = verify(run)
    check_checkpoint(found, step, checkpoint)
    if found.faults:
        raise ValueError(
            f"RUN = '{run}': {'; '.join(found.faults)}: restore its files as the run wrote them"
        )
    terms = dataclasses.asdict(ledger) | dataclasses.asdict(ledger.settings)
    terms |= {
        "segments": [dataclasses.asdict(s) for s in ledger.segments() if s.steps > 0],
        "starts": [dataclasses.asdict(s) for s in ledger.starts() if s.steps > 0],
        # Of the folder's account, which gives epsilon.
        "accountant": found.ledger.settings.accountant,
        "adaptive": found.ledger.adaptive,
        "budget": dataclasses.asdict(found.ledger)["budget"],
        "steps_executed": found.steps_executed,
        "epsilon_executed": found.epsilon_executed,
        "caveats": list(dict.fromkeys([*ledger.caveats, *found.ledger.caveats])),
        "versions": versions(),
    }
    return {key: terms[key] for key in PUBLIC_KEYS}


def _refuse_not_private(run: str, ledger: Ledger, told: dict[str, Any]) -> None:
    if ledger.private and told.get("private") is True and told.get("epsilon") is not None:
        return
    caveats = told["caveats"] if isinstance(told["caveats"], list) else []
    why = "; ".join(dict.fromkeys([*ledger.caveats, *map(str, caveats)])) or PRIVACY_FILE
    raise ValueError(
        f"RUN = '{run}': it is NOT private ({why}), and nothing undoes that; train afresh in "
        "another job.dump_folder"
    )
