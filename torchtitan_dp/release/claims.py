"""What a release publishes: its claims, and the names that its owner gives.

Guarantee:
    - The returned terms are those of the ledger inside the checkpoint, and count every step that
      the run ever began and every step that was planned, unless the owner states that neither
      results nor a clock decided when to stop, or that nobody saw anything of lost steps.
    - Checkpoint, `privacy.json` and executed steps must agree: disagreement is refused.
    - Nothing in the terms depends on how many steps each start took or lost.
"""

import re
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.ledger import PRIVACY_FILE, Lineage, RunLog
from torchtitan_dp.ledger.lineage import of_weights
from torchtitan_dp.ledger.schema import read_published_fields, released
from torchtitan_dp.ledger.spending import recorded, spent

STOP_STATED = "the owner states that neither results nor a clock decided when to stop"
LOST_STATED = (
    "the owner states that nobody saw anything of the steps that were lost in crashes, which "
    "epsilon therefore leaves out"
)


def claims(
    run: str,
    checkpoint: str,
    lineage: Lineage,
    *,
    stop_not_from_results: bool = False,
    lost_steps_not_seen: bool = False,
) -> dict[str, Any]:
    """Return the `privacy.json` of the weights in the folder `checkpoint`.

    `lineage` is that of the checkpoint. The two options are the owner's statements `STOP_STATED`
    and `LOST_STATED`: epsilon leaves out planned steps that were not taken, and lost ones. Raises
    ValueError, one line, if the run is not private or its files disagree.
    """
    if lineage.is_trial:
        raise ValueError(
            f"RUN = '{run}': is a trial of a search, or began with the weights of one, and its "
            "epsilon leaves out what the other trials spent on the choice; train a run with the "
            "trial's keys from the weights that the search began with"
        )
    published = read_published_fields(run)
    if published is None:
        raise ValueError(f"RUN = '{run}': it has no {PRIVACY_FILE}; restore it")
    if not (lineage.private and published["private"] and published["epsilon"] is not None):
        caveats = [*lineage.caveats, *recorded(published["caveats"])]
        raise ValueError(
            f"RUN = '{run}': it is NOT private ({'; '.join(dict.fromkeys(caveats)) or PRIVACY_FILE}"
            "), permanently; train afresh in another job.dump_folder"
        )
    step = int(checkpoint.rpartition("-")[2])
    if lineage.steps != step:
        raise ValueError(
            f"{checkpoint}: its ledger counts {lineage.steps} steps; give the folder its name back"
        )
    found = verify(run)
    log = RunLog(run)
    if found.faults:
        raise ValueError(
            f"RUN = '{run}': {'; '.join(found.faults)}: restore its files as the run wrote them"
        )
    # The folder's account gives epsilon: its caveats, marks and lost steps count. Planned steps
    # count from the released weights on, as if they were loaded now.
    account = log.enter_lost(of_weights(found.ledger, lineage))
    executed, planned = found.epsilon_executed, found.epsilon_planned
    assert executed is not None
    assert planned is not None
    stated = [STOP_STATED] if stop_not_from_results and account.left else []
    stated += [LOST_STATED] if lost_steps_not_seen and account.lost else []
    left = 0 if stop_not_from_results else account.left
    begun = spent(account, lost=not lost_steps_not_seen)
    steps = begun.segments(account.settings.mechanism, left)
    counts = {
        (False, False): "planned_steps",
        (True, False): "executed_steps",
        (False, True): "kept_and_planned_steps",
        (True, True): "kept_steps",
    }[stop_not_from_results, lost_steps_not_seen]
    return released(account, executed, planned, counts, steps, stated)


_OF_THE_HUB = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)  # a model or a data set
_LICENSE = re.compile(r"[a-z][a-z0-9.+-]*", re.ASCII)
_NOT_TEXT_IN_YAML = re.compile(r"\d[^/]*|null|true|false|yes|no|on|off|y|n", re.IGNORECASE)


@dataclass(frozen=True)
class PublicNames:
    """Names to publish; what is None or empty, the card leaves to fill in."""

    base_model: str | None = None
    """The model that training started from, on Hugging Face's hub."""
    license: str | None = None
    """The identifier of a license, as Hugging Face's hub lists them."""
    datasets: tuple[str, ...] = ()
    """The data sets of the records, on Hugging Face's hub."""
    unit_name: str | None = None
    """A word for a unit, in the place of "unit" or "record"."""

    def check(self) -> None:
        """Raise ValueError, one line, for what would publish a path or break the card."""
        if self.base_model is not None:
            _check_of_the_hub("--base_model", self.base_model, "model", "meta-llama/Llama-3.2-1B")
        for name in self.datasets:
            _check_of_the_hub("--datasets", name, "data set", "HuggingFaceFW/fineweb-edu")
        if self.license is not None and not _is_name(_LICENSE, self.license):
            raise ValueError(
                f"--license = '{self.license}': must be an identifier of Hugging Face's list of "
                "licenses, such as apache-2.0, llama3.2 or other"
            )
        if self.unit_name is not None and not self.unit_name.isalpha():
            raise ValueError(
                f"--unit_name = '{self.unit_name}': must be one word in the singular, such as "
                "patient"
            )


NO_NAMES = PublicNames()


def _check_of_the_hub(option: str, name: str, kind: str, example: str) -> None:
    if not _is_name(_OF_THE_HUB, name):
        raise ValueError(
            f"{option} = '{name}': it would be published, and is not a name on Hugging Face's "
            f"hub; give the one under which others find the {kind}, such as {example}"
        )


def _is_name(pattern: re.Pattern[str], name: str) -> bool:
    return bool(pattern.fullmatch(name)) and not _NOT_TEXT_IN_YAML.fullmatch(name)
