"""The model card of a release: the values for its text, `card.md.j2`.

Guarantee:
    The card has the given terms, fixed text, and settings from an allow-list: no path, name or
    number that depends on records; `PublicNames` are the owner's. No claim is rounded in its own
    favour: epsilon, its consequences and q are rounded up, sigma is rounded down, and delta and C
    are exact.
"""

import functools
import math
from pathlib import Path
from typing import Any

import jinja2

from torchtitan_dp.checkpoint.initial import PUBLIC
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import AS_GIVEN, rope_in_words
from torchtitan_dp.data.formats import FORMATS
from torchtitan_dp.data.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.models.families import ModelArgs, family_of, parameter_count, without_lora
from torchtitan_dp.optimizer import MomentumSGD
from torchtitan_dp.privacy.accounting import rounded_down, rounded_up
from torchtitan_dp.privacy.meaning import Meaning
from torchtitan_dp.privacy.mechanism import from_fields
from torchtitan_dp.release.claims import NO_NAMES, PublicNames

OWNER_ITEMS = {
    "License and base model": "Also in the front matter: `license`, `base_model`, `datasets`.",
    "Purpose": "What is the model for, and what is it not for?",
    "Origin of the data": (
        "Where do the records come from, and on what legal ground or consent are they used?"
    ),
    "Duplicates": (
        "Does one person's content stand under several units, or several people's in one unit? "
        "What was removed?"
    ),
    "Other uses of the data": (
        "Which tuning runs, evaluations, statistics or other models of the same records were "
        "published or decided something? Their ε adds to the one above."
    ),
    "Total budget": "What may all releases from these records spend together?",
    "Access": "Who can reach the records, the logs, the checkpoints and the machines that trained?",
    "Retention": "When are records, logs and checkpoints deleted?",
    "Audit": (
        "What did `python -m torchtitan_dp.audit` find, on which records? (On the same ones, its "
        "published result spends ε as well.)"
    ),
    "Quality": (
        "How well does it do on public data, and for which groups of people worse than for others? "
        "Clipping and noise cost rare groups most."
    ),
    "Source code": "Where can the program of the commit named above be read?",
    "Contact": "Whom does one ask, and where are suspected leaks reported?",
}
"""Questions that the card asks and only the owner can answer."""

_ACCOUNTANTS = {
    "rdp": "Opacus' Renyi accountant, an upper bound",
    "pld": "the privacy loss distributions of Google's dp-accounting, rounded pessimistically",
}


def model_card(
    terms: dict[str, Any],
    config: JobConfig,
    args: ModelArgs,
    *,
    decay: float | None = None,
    names: PublicNames = NO_NAMES,
) -> str:
    """Write Markdown with Hugging Face's front matter.

    Args:
        terms: from `release.claims.claims`.
        config: the run's, of which public settings are shown.
        args: of the released model; with `lora`, of its adapters alone.
        decay: of the released average of weights; None for the last step's weights.
    """
    unit = names.unit_name or str(terms["privacy_unit"]).split()[0]
    earlier = [Ancestor.from_fields(fields) for fields in terms["ancestors"]]
    return _template().render(
        terms=terms,
        mechanism=from_fields(terms),
        title=_title(args),
        adapters=args.lora is not None,
        extended=rope_in_words(config) != AS_GIVEN,
        license=names.license,
        base_model=names.base_model,
        datasets=names.datasets,
        **guarantee(terms, config, unit_name=names.unit_name),
        covers=_covers(terms),
        lost=_lost(terms),
        heldout_fraction=config.data.heldout_fraction,
        accountant=_ACCOUNTANTS[terms["accountant"]],
        earlier=[{"steps": a.steps, "mechanism": a.settings.mechanism} for a in earlier],
        assumptions=[*_start_and_tokens(terms, config), *terms["assumptions"]],
        training=_training(terms, config, args, unit, decay),
        owner_items=OWNER_ITEMS,
    )


def guarantee(
    terms: dict[str, Any], config: JobConfig | None, *, unit_name: str | None = None
) -> dict[str, Any]:
    """Return the values of the guarantee in words, `meaning.j2`; without the run's `config` the
    kind of unit is not described."""
    unit = unit_name or str(terms["privacy_unit"]).split()[0]
    kind = ""
    if config is not None:
        field, record = config.data.unit_field, FORMATS[config.training.dataset].record
        kind = f" (all records with one value of `{field}`)" if field else f" ({record})"
    return {
        "unit": unit,
        "kind_of_unit": kind,
        "factor": _factor(terms["epsilon"]),
        "meaning": Meaning.from_json(terms["meaning"]).sentences(unit),
    }


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "up": rounded_up,
        "down": rounded_down,
        "exact": exact,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    }
    return environment.get_template("card.md.j2")


def _title(args: ModelArgs) -> str:
    count = parameter_count(without_lora(args))
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    model = f"{family_of(args).title} of {size} parameters"
    return f"Adapters for a {model}" if args.lora is not None else f"A {model}"


def _covers(terms: dict[str, Any]) -> str:
    counts, steps, lost = terms["epsilon_counts"], terms["steps"], _lost(terms)
    left = max(terms["planned_steps"] - steps, 0) if "planned" in counts else 0
    parts = [f"the {steps:,} steps of these weights"]
    if lost and not counts.startswith("kept"):
        parts.append(f"{lost:,} for steps that crashes lost")
    if left:
        parts.append(f"{left:,} that were planned and not taken")
    return ", ".join(parts)


def _lost(terms: dict[str, Any]) -> int:
    return int(terms["steps_executed"] - terms["steps"])


def exact(value: float) -> str:
    """Write a number with as many digits as it has.

    >>> exact(1e-5), exact(1.2345649e-06), exact(1.0), exact(0.1)
    ('1e-05', '1.2345649e-06', '1', '0.1')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _factor(epsilon: float) -> str:
    """Write e^epsilon, rounded up."""
    if epsilon < 20:
        return rounded_up(math.exp(epsilon), digits=3)
    return f"10^{math.ceil(epsilon / math.log(10))}"


def _start_and_tokens(terms: dict[str, Any], config: JobConfig) -> list[str]:
    # The ledger's entry counts, too: the configuration is the last start's, which may have resumed.
    given = config.checkpoint.initial_load_path or config.checkpoint.initial_load_in_hf
    given = given or any(caveat.endswith(PUBLIC) for caveat in terms["caveats"])
    if terms["ancestors"]:
        start = (
            "the weights that training started from saw the same data, with privacy: their steps "
            "are counted in ε"
        )
    elif given:
        start = (
            "the weights that training started from were given. Anything they reveal themselves of "
            "the same data is not counted, unless a line below counts it"
        )
    else:
        start = "training started from random weights of a public seed"
    if isinstance(load_tokenizer(config.model.hf_assets_path), ByteTokenizer):
        return [start, "text is read as bytes: no tokenizer was learned"]
    return [
        start,
        "the tokenizer was given, and is taken as public: it must not have been learned from the "
        "private data",
    ]


def _training(
    terms: dict[str, Any],
    config: JobConfig,
    args: ModelArgs,
    unit: str,
    decay: float | None,
) -> dict[str, object]:
    optimizer, schedule, training = config.optimizer, config.lr_scheduler, config.training
    windows = terms["windows_per_draw"]
    return {
        "trained": terms["trained"],
        **({"rotary embeddings": rope} if (rope := rope_in_words(config)) != AS_GIVEN else {}),
        "weights": "those after the last step" if decay is None else _average(decay),
        "model": f"{family_of(args).title}, {args.n_layers} layers of {args.dim}, {args.n_heads} "
        f"heads, {args.vocab_size} tokens" + (", tied embeddings" if args.tie_embeddings else ""),
        "sample": f"at most {training.seq_len} tokens of one {unit} in a step",
        f"samples of a drawn {unit}": (
            "1" if windows == 1 else f"up to {windows}, whose gradients' mean is clipped as one"
        ),
        "targets": terms["targets"],
        "expected batch": terms["expected_batch_size"],
        "optimizer": f"{optimizer.name}, {_state(optimizer)}, "
        f"weight decay {optimizer.weight_decay:g}",
        "learning rate": f"{optimizer.lr:g}; warm-up {schedule.warmup_steps} steps, "
        f"{schedule.decay_type} decay to {schedule.min_lr_factor:g} of it",
        "precision": f"{training.mixed_precision_param}; {training.mixed_precision_reduce} "
        "reduction, norms and noise",
        **_heldout_loss(terms, unit),
    }


def _heldout_loss(terms: dict[str, Any], unit: str) -> dict[str, str]:
    losses = terms["heldout_losses"]
    if losses is None or not losses["losses"]:
        return {}
    step, loss, deviation = losses["losses"][-1]
    return {
        "held-out loss": f"{loss:.4f} nats a token after step {step}, the mean over held-out "
        f"{unit}s, clipped to {exact(losses['clip'])}, with {losses['noise'].capitalize()} noise "
        f"of standard deviation {deviation:.2g}"
    }


def _state(optimizer: Any) -> str:
    """Describe the settings of `[optimizer]` that its name has use for."""
    if optimizer.name == MomentumSGD.__name__:
        return f"momentum {optimizer.beta1:g}"
    return f"betas {optimizer.beta1:g} and {optimizer.beta2:g}, eps {optimizer.eps:g}"


def _average(decay: float) -> str:
    """Describe the average of weights, and why epsilon covers it."""
    return (
        "an exponential moving average of those that the average began with and those after each "
        f"step since (decay {decay}; at first (1 + t) / (10 + t)); it is computed from them alone, "
        "so that ε covers it"
    )
