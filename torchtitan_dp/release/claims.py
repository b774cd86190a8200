"""What may be claimed of a checkpoint: its own ledger, `privacy.json` and the executed steps agree.

Guarantee:
    The returned terms are those of the ledger inside the checkpoint, at every step that the run
    ever began; and, unless the owner states that results did not decide when to stop, at every step
    that was planned. Disagreement is never settled: it is refused.
"""

import dataclasses
from typing import Any

from torchtitan_dp.checkpoint.verify import check_checkpoint, verify
from torchtitan_dp.ledger import PRIVACY_FILE, Ledger, schema
from torchtitan_dp.ledger.account import told_of
from torchtitan_dp.ledger.caveats import recorded
from torchtitan_dp.ledger.files import read_published_fields

STATED = "the owner states that results did not decide when to stop"


def claims(
    run: str, checkpoint: str, ledger: Ledger, *, stop_not_from_results: bool = False
) -> dict[str, Any]:
    """Return the terms that hold for the weights in the folder `checkpoint`: a `privacy.json`.

    Args:
        run: the folder that holds `privacy.json` and the executed steps.
        checkpoint: named `step-N`.
        ledger: that of the checkpoint.
        stop_not_from_results: what the owner states of a run that stopped before its planned steps;
            its epsilon then is of the steps that were begun.

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
    account = found.ledger  # of the folder, which gives epsilon: its caveats, marks and budget hold
    account.go_back_to(ledger)  # what is planned is planned from the released weights on
    epsilon_executed, epsilon_planned = found.epsilon_executed, found.epsilon_planned
    assert epsilon_executed is not None
    assert epsilon_planned is not None
    ledger.inherit(account)
    ledger.settings = dataclasses.replace(ledger.settings, accountant=account.settings.accountant)
    caveats = list(dict.fromkeys([*ledger.caveats, *found.caveats()]))
    epsilon, steps = epsilon_planned, found.planned()
    if stop_not_from_results:
        epsilon, steps = epsilon_executed, found.executed()
        if account.steps < account.planned_steps:
            caveats.append(STATED)
    return schema.assemble(
        ledger,
        {
            "epsilon": epsilon,
            "epsilon_counts": "executed_steps" if stop_not_from_results else "planned_steps",
            "epsilon_planned": epsilon_planned,
            "epsilon_executed": epsilon_executed,
            "steps_executed": found.steps_executed,
            "caveats": caveats,
            **told_of(ledger, steps, epsilon),
        },
        release=True,
    )


def _refuse_not_private(run: str, ledger: Ledger, told: dict[str, Any]) -> None:
    if ledger.private and told["private"] and told["epsilon"] is not None:
        return
    why = "; ".join(dict.fromkeys([*ledger.caveats, *recorded(told["caveats"])])) or PRIVACY_FILE
    raise ValueError(
        f"RUN = '{run}': it is NOT private ({why}), and nothing undoes that; train afresh in "
        "another job.dump_folder"
    )
