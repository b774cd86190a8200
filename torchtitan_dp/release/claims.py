"""The claims of a release, on which checkpoint, `privacy.json` and executed steps must agree.

Guarantee:
    The returned terms are those of the ledger inside the checkpoint, and count every step that the
    run ever began and every step that was planned, unless the owner states that neither results nor
    a clock decided when to stop, or that nobody saw anything of lost steps. Disagreement is
    refused, never resolved. Nothing in the terms depends on how many steps each start took or lost.
"""

from typing import Any

from torchtitan_dp.checkpoint.verify import check_checkpoint, verify
from torchtitan_dp.ledger import PRIVACY_FILE, Ledger
from torchtitan_dp.ledger.account import released
from torchtitan_dp.ledger.caveats import recorded
from torchtitan_dp.ledger.executed import ExecutedSteps
from torchtitan_dp.ledger.files import read_published_fields

STOP_STATED = "the owner states that neither results nor a clock decided when to stop"
LOST_STATED = (
    "the owner states that nobody saw anything of the steps that were lost in crashes, which "
    "epsilon therefore leaves out"
)


def claims(
    run: str,
    checkpoint: str,
    ledger: Ledger,
    *,
    stop_not_from_results: bool = False,
    lost_steps_not_seen: bool = False,
) -> dict[str, Any]:
    """Return the `privacy.json` of the weights in the folder `checkpoint`.

    Args:
        run: the folder with `privacy.json` and the executed steps.
        checkpoint: named `step-N`.
        ledger: that of the checkpoint.
        stop_not_from_results: the owner states of a run that stopped before its planned steps that
            neither results nor a clock decided when; epsilon then leaves out the planned steps that
            were not taken.
        lost_steps_not_seen: the owner states that nobody saw anything of lost steps; epsilon then
            leaves them out.

    Raises:
        ValueError: one line for the user; the run is not private, or its files disagree.
    """
    published = read_published_fields(run)
    if published is None:
        raise ValueError(f"RUN = '{run}': it has no {PRIVACY_FILE}; restore it")
    _refuse_not_private(run, ledger, published)
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
    # The folder's account gives epsilon: its caveats, marks, budget and lost steps count.
    account = found.ledger
    account.go_back_to(ledger)  # planned steps count from the released weights on
    ExecutedSteps(run).enter_lost(account, also=found.begun)
    executed, planned = found.epsilon_executed, found.epsilon_planned
    assert executed is not None
    assert planned is not None
    stated = [STOP_STATED] if stop_not_from_results and account.left else []
    stated += [LOST_STATED] if lost_steps_not_seen and account.published_lost().steps else []
    counts, steps = {
        (False, False): ("planned_steps", account.planned()),
        (True, False): ("executed_steps", account.executed()),
        (False, True): ("kept_and_planned_steps", account.kept_and_planned()),
        (True, True): ("kept_steps", account.kept()),
    }[stop_not_from_results, lost_steps_not_seen]
    return released(
        account,
        epsilon=account.compose(steps),
        counts=counts,
        steps=steps,
        executed=executed,
        planned=planned,
        stated=stated,
    )


def _refuse_not_private(run: str, ledger: Ledger, published: dict[str, Any]) -> None:
    if ledger.private and published["private"] and published["epsilon"] is not None:
        return
    why = (
        "; ".join(dict.fromkeys([*ledger.caveats, *recorded(published["caveats"])])) or PRIVACY_FILE
    )
    raise ValueError(
        f"RUN = '{run}': it is NOT private ({why}), permanently; train afresh in "
        "another job.dump_folder"
    )
