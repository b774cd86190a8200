"""What a release publishes: its claims and its model card.

Guarantee:
    - `claims` are those of the ledger inside the checkpoint, and count every step that the run ever
      began and every step that was planned, unless the owner states that neither results nor a
      clock decided when to stop, or that nobody saw anything of lost steps.
    - Checkpoint, `privacy.json` and executed steps must agree: disagreement is refused.
    - Nothing in the terms depends on how many steps each start took or lost.
    - The card has the given terms, fixed text, and the settings that its template names: no path,
    name or number that depends on records. No claim is rounded in its own favour: epsilon, its
      consequences and q are rounded up, sigma is rounded down, and delta and C are exact.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.formats import FORMATS
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_dp.ledger import PRIVACY_FILE, Lineage, RunLog
from torchtitan_dp.ledger.lineage import LATER, Ancestor, of_weights
from torchtitan_dp.ledger.schema import in_sentences, in_words, read_run, released
from torchtitan_dp.ledger.spending import (
    PUBLIC,
    Run,
    Total,
    reasons,
    recorded,
    spent,
    to_act_on,
    total,
)
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.hugging_face import parameter_count, without_lora
from torchtitan_dp.privacy.meaning import templates
from torchtitan_dp.privacy.segments import Mechanism

STOP_STATED = "the owner states that neither results nor a clock decided when to stop"
LOST_STATED = "the owner states that nobody saw lost steps, which epsilon therefore leaves out"


def refuse_not_private(run: str, caveats: Iterable[str]) -> NoReturn:
    raise ValueError(
        f"RUN = '{run}': it is NOT private ({reasons(caveats) or PRIVACY_FILE}), permanently; "
        "train afresh in another job.dump_folder"
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
            "epsilon leaves out what the others spent; train a run with the trial's keys afresh"
        )
    published = read_run(run)
    if not (lineage.private and published["private"] and published["epsilon"] is not None):
        refuse_not_private(run, [*lineage.caveats, *recorded(published["caveats"])])
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
    steps = spent(account, left, lost=not lost_steps_not_seen)
    counts = {
        (False, False): "planned_steps",
        (True, False): "executed_steps",
        (False, True): "kept_and_planned_steps",
        (True, True): "kept_steps",
    }[stop_not_from_results, lost_steps_not_seen]
    return released(account, executed, planned, counts, steps, stated)


def add_up(run: str, lineage: Lineage, others: Sequence[str]) -> tuple[list[Run], Total]:
    """Return `others`, and what they spend with a run's weights, of the `lineage` of a checkpoint,
    all that any of them began or planned. ValueError, one line: one is not private, or verified."""
    own, *named = (verify(one) for one in (run, *others))
    for one in named:
        if not (one.verified and one.ledger.private):
            raise ValueError(f"--with = '{one.folder}': not verified, or not private by its ledger")
    own.ledger = RunLog(run).enter_lost(of_weights(own.ledger, lineage))  # as `claims` counts
    return named, total([own, *named], overlapping=True)


_OF_THE_HUB = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_NOT_TEXT_IN_YAML = re.compile(r"\d[^/]*|null|true|false|yes|no|on|off|y|n", re.IGNORECASE)


def check_base_model(name: str) -> None:
    """Raise ValueError, one line, for a name that would publish a path or break the card."""
    if not _OF_THE_HUB.fullmatch(name) or _NOT_TEXT_IN_YAML.fullmatch(name):
        raise ValueError(
            f"--base_model = '{name}': it would be published, and is not a name on Hugging Face's "
            "hub; give the one under which others find the model, such as meta-llama/Llama-3.2-1B"
        )


def model_card(
    terms: dict[str, Any],
    config: JobConfig,
    args: ModelArgs,
    *,
    decay: float | None = None,
    base_model: str | None = None,
    more: tuple[list[Run], Total] | None = None,
) -> str:
    """Write Markdown with Hugging Face's front matter.

    Of a model with `args.lora` its adapters alone are released; `decay` is that of the released
    average of weights, None for the last step's weights; `base_model` the public name of the model
    that training started from; `more` other runs and their sum, of `add_up`.
    """
    # The ledger's entry counts, too: the configuration is the last start's, which may have resumed.
    given = config.checkpoint.initial_load_in_hf
    count, named = parameter_count(without_lora(args)), more[0] if more else []
    theirs = [f"of a run that the owner named: {c}" for r in named for c in to_act_on(r.caveats())]
    return _TEMPLATES.get_template("card.md.j2").render(
        terms=terms,
        mechanism=Mechanism.from_fields(terms),
        in_words=in_words,
        args=args,
        family=args.title,
        size=f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
        adapters=args.lora is not None,
        base_model=base_model,
        others=len(named),
        together=more and more[1],
        **guarantee(terms, config),
        caveats=to_act_on(terms["caveats"]) + theirs,
        lost=terms["steps_executed"] - terms["steps"],
        covered=covered(terms),
        condition=condition(terms),
        heldout_fraction=config.data.heldout_fraction,
        earlier=[Ancestor.from_fields(fields) for fields in terms["ancestors"]],
        given=given or any(caveat.endswith(PUBLIC) for caveat in terms["caveats"]),
        reads_bytes=isinstance(load_tokenizer(config.model.hf_assets_path), ByteTokenizer),
        decay=decay,
        seq_len=config.training.seq_len,
        dtypes=(config.training.mixed_precision_param, config.training.mixed_precision_reduce),
        optimizer=config.optimizer,
        schedule=config.lr_scheduler,
    )


def covered(terms: dict[str, Any]) -> str:
    """Return the steps that a release's epsilon counts, in words."""
    steps, counts = terms["steps"], terms["epsilon_counts"]
    lost, left = terms["steps_executed"] - steps, terms["planned_steps"] - steps
    words = [f"the {steps:,} steps of these weights"]
    words += [f"{lost:,} that crashes may have lost"] * (lost > 0 and "kept" not in counts)
    words += [f"{left:,} that were planned and not taken"] * (left > 0 and "planned" in counts)
    return ", ".join(words)


def condition(terms: dict[str, Any]) -> str:
    """Return the condition of the epsilon of a run that stopped early, or was changed by a later
    start; nothing of any other."""
    steps, planned, made = terms["steps"], terms["planned_steps"], list[str]()
    if steps < planned and "planned" in terms["epsilon_counts"]:
        made.append(f"made the owner stop after {steps} of {planned} steps")
    changes = [one.removesuffix(LATER) for one in terms["caveats"] if one.endswith(LATER)]
    made += [f"decided that {change}after the first start" for change in changes]
    return f"it holds only if no loss, no log and no clock {', or '.join(made)}" if made else ""


def guarantee(terms: dict[str, Any], config: JobConfig | None) -> dict[str, Any]:
    """Return the values of the guarantee in words, `meaning.j2`; without the run's `config` the
    kind of unit is not described."""
    unit = str(terms["privacy_unit"]).split()[0]
    found: dict[str, Any] = {"unit": unit, "person": unit, "field": None, "kind_of_unit": ""}
    found |= {"owners": False, "not_owners": 0, "meaning": in_sentences(terms)}
    if config is None:
        return found
    field, record = config.data.unit_field, FORMATS[config.training.dataset].record
    if isinstance(field, list):
        fields = " or ".join(f"`{name}`" for name in field)
        named = {"kind_of_unit": f" (all records that name the person in {fields})"}
        others = len(config.data.not_owners)
        return found | named | {"person": "person", "owners": True, "not_owners": others}
    if field is None:
        return found | {"kind_of_unit": f" ({record})"}
    person = field.removesuffix("_id").replace("_", " ")  # patient_id: one patient
    kind = f" (all records with one value of `{field}`)"
    return found | {"person": person, "field": field, "kind_of_unit": kind}


_TEMPLATES = templates(Path(__file__).parent)
OWNER_ITEMS: dict[str, str] = vars(_TEMPLATES.get_template("questions.j2").module)["OWNER_ITEMS"]
"""Questions that the card asks and only the owner can answer."""
