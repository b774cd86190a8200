"""What may be claimed of a checkpoint: its own ledger, `privacy.json` and the executed steps agree.

Guarantee:
    The returned terms are those of the ledger inside the checkpoint, at every step that the run
    ever began. Disagreement is never settled: it is refused.
"""

import dataclasses
import json
import math
import os
from typing import Any

from torchtitan_dp.ledger import EXECUTED_FILE, PRIVACY_FILE, ExecutedSteps, Ledger, read_published

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
    told = _told(run)
    _refuse_not_private(run, ledger, told)
    step = int(checkpoint.rpartition("-")[2])
    if ledger.steps != step:
        raise ValueError(
            f"{checkpoint}: its ledger counts {ledger.steps} steps; give the folder its name back"
        )
    executed = ExecutedSteps(run).count
    _refuse_edited(run, ledger, told)
    if executed < told["steps_executed"]:
        raise ValueError(
            f"{os.path.join(run, EXECUTED_FILE)} counts {executed} steps, but {PRIVACY_FILE} "
            f"{told['steps_executed']}: restore it from where the run was trained"
        )
    terms = ledger.published(executed)
    terms["caveats"] = list(dict.fromkeys([*terms["caveats"], *told["caveats"]]))
    return {key: terms[key] for key in PUBLIC_KEYS}


def _told(run: str) -> dict[str, Any]:
    """The content of `privacy.json`, which must be one of ours."""
    if read_published(run) is None:
        raise ValueError(f"RUN = '{run}': it has no {PRIVACY_FILE}; restore it")
    with open(os.path.join(run, PRIVACY_FILE), encoding="utf-8") as file:
        return json.load(file)


def _refuse_not_private(run: str, ledger: Ledger, told: dict[str, Any]) -> None:
    if ledger.private and told.get("private") is True and told.get("epsilon") is not None:
        return
    caveats = told["caveats"] if isinstance(told["caveats"], list) else []
    why = "; ".join(dict.fromkeys([*ledger.caveats, *map(str, caveats)])) or PRIVACY_FILE
    raise ValueError(
        f"RUN = '{run}': it is NOT private ({why}), and nothing undoes that; train afresh in "
        "another job.dump_folder"
    )


def _refuse_edited(run: str, ledger: Ledger, told: dict[str, Any]) -> None:
    """Hold `privacy.json` against what the ledger would say at the steps that it tells of."""
    path = os.path.join(run, PRIVACY_FILE)
    counts = [told.get("steps"), told.get("steps_executed")]
    if not all(isinstance(n, int) and n >= ledger.steps for n in counts):
        raise ValueError(
            f"{path} tells of {counts[0]} steps ({counts[1]} executed), but a checkpoint has "
            f"{ledger.steps}: restore it as the run wrote it"
        )
    steps, executed = told["steps"], told["steps_executed"]
    expected = dataclasses.replace(ledger, steps=steps).published(executed)
    for key, value in expected.items():
        if not _agree(key, value, told.get(key)):
            raise ValueError(
                f"{path}: {key} = {json.dumps(told.get(key))}, but the checkpoint's ledger says "
                f"{json.dumps(value)}: restore the file as the run wrote it"
            )


def _agree(key: str, expected: Any, told: Any) -> bool:
    if key == "caveats":  # some may have come after the checkpoint
        return isinstance(told, list) and set(expected) <= set(map(str, told))
    if key.startswith("epsilon"):  # it may have been computed by another release of a library
        return isinstance(told, int | float) and math.isclose(expected, told, rel_tol=1e-4)
    return bool(expected == told)
