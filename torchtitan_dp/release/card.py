"""The model card of a release: its guarantee in words, made from the terms in `privacy.json`.

It answers what NIST SP 800-226 and section 5.3 of "How to DP-fy ML" (Ponomareva et al. 2023) ask of
a claim; what only the owner knows is left to be filled in (`owner`).

Guarantee:
    The card holds the terms that it is handed, fixed text, and settings from an allow-list: no
    path, name or number that records decide; the base model and the word for a unit are the
    owner's. No claim is rounded in its own favour: epsilon, what follows from it and q are rounded
    up, sigma is rounded down, and delta and C are exact.
"""

import math
from typing import Any

from torchtitan_dp.checkpoint.average import UNRECORDED, Decay, decays_in_words
from torchtitan_dp.checkpoint.initial import PUBLIC
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.records.formats import FORMATS
from torchtitan_dp.data.samples.tokenizer import ByteTokenizer, load_tokenizer
from torchtitan_dp.models.families import ModelArgs, family_of, parameter_count, without_lora
from torchtitan_dp.privacy.accounting import rounded_down, rounded_up
from torchtitan_dp.privacy.envelope import largest_ratio
from torchtitan_dp.privacy.meaning import Meaning
from torchtitan_dp.privacy.mechanism import from_fields
from torchtitan_dp.release.owner import owner_section
from torchtitan_dp.release.use import use_section

_FRONT = """---
# license: TO FILL IN (whether you may publish depends on your data and starting weights)
{base_model}
library_name: {library}
pipeline_tag: text-generation
tags:
- differential-privacy
- dp-sgd
---
"""
_NO_BASE_MODEL = "# base_model: TO FILL IN (what training started from, if anything)"
_ACCOUNTANTS = {
    "prv": "the upper end of the error bar of Opacus' PRV accountant",
    "rdp": "Opacus' Renyi accountant, an upper bound",
    "pld": "the privacy loss distributions of Google's dp-accounting, rounded pessimistically",
}
_NEIGHBOURS = {
    "zero_out": (
        "trained with the content of that {unit} replaced by an empty one",
        "`zero_out`: one {unit}'s content is replaced by an empty one. How many there are is "
        "treated as public.",
    ),
    "add_remove": (
        "trained without that {unit}",
        "`add_remove`: one {unit} more or less.",
    ),
}


def model_card(
    terms: dict[str, Any],
    config: JobConfig,
    args: ModelArgs,
    *,
    decays: tuple[Decay, ...] | None = None,
    base_model: str | None = None,
    unit_name: str | None = None,
) -> str:
    """Write Markdown with Hugging Face's front matter.

    Args:
        terms: as `release.claims.claims` returns them.
        config: the run's, of which public settings are told.
        args: of the model that is released: with `lora`, its adapters alone are.
        decays: of the average of weights, if that is released; None: the last step's weights are.
        base_model: the public name of what training started from; None leaves it to be filled in.
        unit_name: a word for a unit, in the place of "unit" or "record".
    """
    if unit_name is not None:
        terms = {**terms, "privacy_unit": unit_name}
    adapters = args.lora is not None
    sections = (
        _guarantee(terms, config),
        _not_said(terms, config),
        _computation(terms),
        _assumptions(terms, config),
        _training(terms, config, args, decays),
        owner_section(),
        use_section(adapters=adapters, base_model=base_model),
    )
    count = parameter_count(without_lora(args))
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    model = f"A {family_of(args).title} of {size} parameters"
    if adapters:
        model = f"Adapters for a{model[1:]}"
    title = f"# {model}, trained with differential privacy"
    front = _FRONT.format(
        library="peft" if adapters else "transformers",
        base_model=f"base_model: {base_model}" if base_model else _NO_BASE_MODEL,
    )
    return "\n".join([front, title, "", *(section.strip() + "\n" for section in sections)])


def _guarantee(terms: dict[str, Any], config: JobConfig) -> str:
    epsilon, delta, unit = terms["epsilon"], terms["delta"], _unit(terms)
    relation = terms["neighbouring_relation"]
    other, says = (text.format(unit=unit) for text in _NEIGHBOURS[relation])
    what = _what(config)
    units = "not public" if terms["units"] is None else f"{terms['units']:,}, public"
    meaning = "".join(f"- {line}\n" for line in Meaning.from_json(terms["meaning"]).sentences(unit))
    return f"""
**These weights are (ε, δ)-differentially private for one {unit}, with ε = {rounded_up(epsilon)}
and δ = {_exact(delta)}.**

## What this means

Take any one {unit}{what} of the training data, and think of a second model, {other}.
Whatever someone looks for in these weights, or in what the model writes, and whatever else they
know: they find it at most {_factor(epsilon)} times (e^ε) as often as with the second model, and
the other way round, but for a probability of {_exact(delta)} (δ). Nothing that is done with the
weights later loosens that bound.

Somebody who knows all the other {unit}s, and tries to tell from the weights whether this one was
among them, can do no better than this:

{meaning}
| | |
| --- | --- |
| privacy unit | one {unit}{what} |
| neighbouring data sets | {says} |
| {unit}s in training | {units} |
| ε | {rounded_up(epsilon)} (rounded up) |
| δ | {_exact(delta)} |
| ε covers | {_covers(terms)} |
| who is trusted | whoever trained: the records lay there in the clear (the central model) |
| what is protected | these weights, and all that is computed from them |

Smaller is stronger. As a guide, Ponomareva et al. (How to DP-fy ML, 2023) call ε up to 1 strong, up
to 10 reasonable, and above that weak.
"""


def _covers(terms: dict[str, Any]) -> str:
    """Say which steps the quoted epsilon is of."""
    counts, steps, lost = terms["epsilon_counts"], terms["steps"], _lost(terms)
    left = max(terms["planned_steps"] - steps, 0) if "planned" in counts else 0
    parts = [f"the {steps:,} steps of these weights"]
    if lost and not counts.startswith("kept"):
        parts.append(f"{lost:,} for steps that crashes lost")
    if left:
        parts.append(f"{left:,} that were planned and not taken")
    return ", ".join(parts)


def _lost(terms: dict[str, Any]) -> int:
    """Return how many steps count as lost."""
    return int(terms["steps_executed"] - terms["steps"])


def _unit(terms: dict[str, Any]) -> str:
    """Name what is protected in a word: a record, or a unit of several."""
    return str(terms["privacy_unit"]).split()[0]


def _what(config: JobConfig) -> str:
    """Say what such a one is."""
    if (field := config.data.unit_field) is not None:
        return f" (all records with one value of `{field}`)"
    return f" ({FORMATS[config.training.dataset].record})"


def _exact(value: float) -> str:
    """Write a number with as many digits as it has.

    >>> _exact(1e-5), _exact(1.2345649e-06), _exact(1.0), _exact(0.1)
    ('1e-05', '1.2345649e-06', '1', '0.1')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _factor(epsilon: float) -> str:
    """Write e^epsilon, rounded up."""
    if epsilon < 20:
        return rounded_up(math.exp(epsilon), digits=3)
    return f"10^{math.ceil(epsilon / math.log(10))}"


def _not_said(terms: dict[str, Any], config: JobConfig) -> str:
    unit = _unit(terms)
    heldout = ""
    if config.data.heldout_fraction > 0:
        heldout = (
            f"- **Held-out data.** {config.data.heldout_fraction:g} of the data was never trained "
            "on. What was decided by looking at the loss on it is outside the guarantee.\n"
        )
    return f"""
## What it does not say

- **Several of one person.** The guarantee is for one {unit}. For somebody with k of them it is kε
  in place of ε, and k e^((k-1)ε) δ in place of δ.
- **Another content.** For one {unit} replaced by *another* of its kind, ε doubles and δ becomes
  (1 + e^ε) δ.
- **What many say.** A text that stands in many of the training data may be learned and repeated.
- **Choosing among runs.** ε is that of this one run. If it or its settings were chosen by looking
  at results on the private data (the training loss, say), or if other models of the same data are
  published, that costs more, and is not counted here. What several runs cost together is computed
  from their folders by `python -m torchtitan_dp.ledger RUN...`.
{heldout}- **Anything outside this folder.** Logs, losses, gradient norms, batch sizes and timing
  are made from the data without noise. They are not part of this release.
- **Quality.** Privacy says nothing of whether the model is right, fair or safe.
"""


def _computation(terms: dict[str, Any]) -> str:
    unit = _unit(terms)
    accountant = f"`{terms['accountant']}`: {_ACCOUNTANTS[terms['accountant']]}"
    program = terms["source"]
    commit = program["commit"] or "unknown"
    changed = ", with changes" if program["modified"] else ""
    q = rounded_up(terms["sample_rate"], digits=6)
    return f"""
## How ε was computed

| | |
| --- | --- |
| mechanism | DP-SGD: in each step, Gaussian noise on the sum of clipped gradients |
| sampling | Poisson: every {unit} by a draw of its own at each step |
| sampling rate q | {q}, from {terms["sample_rate_source"]} |
| noise multiplier σ | {rounded_down(terms["noise_multiplier"], digits=6)} |
| clipping | {_clipping(terms)} |
| divisor of the sum | {terms["expected_batch_size"]}, the expected batch |
| noise safe in its low bits | {_yes(terms["secure_noise"])} (`privacy.secure_noise`) |
| sum exact | {_yes(terms["exact_sum"])} (`privacy.exact_sum`) |
| steps of these weights | {terms["steps"]:,} of {terms["planned_steps"]:,} planned |
| steps lost in crashes | {_crashes(terms)} |
| accountant | {accountant} |
| program | torchtitan_dp {program["version"]}, commit {commit}{changed} |
{_segments(terms)}
In each step every {unit} takes part with probability q; {_clipped(terms)}; noise of
standard deviation σC is added once to the sum, in every coordinate; and the sum is divided by a
constant. `privacy.json` has these steps as an event of Google's dp-accounting (`dp_event`), from
which anybody can compute ε again.
"""


def _crashes(terms: dict[str, Any]) -> str:
    """Say how many steps count as lost, and why that is no exact number."""
    if not _lost(terms):
        return "none"
    return (
        f"{_lost(terms):,} at most: each crash counts as many as it could lose, since how many it "
        "did lose follows from how long steps took"
    )


def _clipping(terms: dict[str, Any]) -> str:
    """Say what gradients are clipped to, and by which norms."""
    C, how = _exact(terms["max_grad_norm"]), f"{terms['clipping']}, {terms['clip_function']}"
    if k := terms["capped_projections"]:
        return (
            f"to C = {C}, {how}, by norms that are estimated ({terms['norm_estimator']}, {k} "
            "random projections); what is longer than its estimate is scaled down to it, so that "
            "nothing counts more than C, and ε is that of exact norms"
        )
    if not terms["projections"]:
        return f"to norm C = {C}, {how}"
    return (
        f"to C = {C}, {how}, by norms that are estimated ({terms['norm_estimator']}, "
        f"{terms['projections']} random projections)"
    )


def _clipped(terms: dict[str, Any]) -> str:
    """Say the same in a clause."""
    if not terms["projections"]:
        return "its gradient is clipped to norm C"
    most = rounded_up(largest_ratio(terms["projections"]), digits=3)
    return (
        "its gradient is clipped by an\nestimate of its norm, so that it may count more than C (at "
        f"most {most} C), which ε includes"
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _segments(terms: dict[str, Any]) -> str:
    """Write rows for what came before the terms above; nothing if they held all along."""
    earlier = [s for ancestor in terms["ancestors"] for s in ancestor["segments"]]
    earlier += terms["segments"][:-1]
    return "".join(
        f"| before that | {s['steps']} steps with "
        f"σ = {rounded_down(s['settings']['noise_multiplier'], digits=6)}, "
        f"q = {rounded_up(s['settings']['sample_rate'], digits=6)}{_projected(s['settings'])} |\n"
        for s in earlier
    )


def _projected(settings: dict[str, Any]) -> str:
    norms = from_fields(settings).norms
    return f", {norms}" if norms else ""


def _assumptions(terms: dict[str, Any], config: JobConfig) -> str:
    # The ledger's word, too: the configuration is the last start's, which may have resumed.
    loaded = config.checkpoint.initial_load_path or config.checkpoint.initial_load_in_hf
    loaded = loaded or any(caveat.endswith(PUBLIC) for caveat in terms["caveats"])
    if terms["ancestors"]:
        start = (
            "The weights that training started from saw the same data, with privacy: their steps "
            "are counted in ε."
        )
    elif loaded:
        start = (
            "The weights that training started from were given. What they themselves may reveal "
            "of the same data is not counted, unless it is said below."
        )
    else:
        start = "Training started from random weights of a public seed."
    tokens = (
        "The tokenizer was given, and is taken as public: it must not have been learned from the "
        "private data."
        if not isinstance(load_tokenizer(config.model.hf_assets_path), ByteTokenizer)
        else "Text is read as bytes: no tokenizer was learned."
    )
    lines = [start, tokens, *map(_sentence, terms["assumptions"])]
    caveats = "".join(f"- {_sentence(caveat)}\n" for caveat in terms["caveats"])
    if caveats:
        caveats = f"\nRecorded by this run, to be read before it is published:\n\n{caveats}"
    listed = "".join(f"- {line}\n" for line in lines)
    return f"""
## What it rests on

{listed}- The mathematics is that of real numbers; training used floating point. Attacks on timing,
  or on the machine that trained, are not covered.
- What is told above (σ, q, C, batch, steps) is public, and was fixed before training.
{caveats}"""


def _sentence(text: str) -> str:
    """Write with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _training(
    terms: dict[str, Any],
    config: JobConfig,
    args: ModelArgs,
    decays: tuple[Decay, ...] | None,
) -> str:
    optimizer, schedule, training = config.optimizer, config.lr_scheduler, config.training
    title = family_of(args).title
    rows = {
        "trained": terms["trained"],
        "weights": "those after the last step" if decays is None else _which(config, decays),
        "model": f"{title}, {args.n_layers} layers of {args.dim}, {args.n_heads} heads, "
        f"{args.vocab_size} tokens" + (", tied embeddings" if args.tie_embeddings else ""),
        "sample": f"at most {training.seq_len} tokens of one {_unit(terms)} in a step",
        "samples of a drawn one": _windows(terms),
        "targets": terms["targets"],
        "expected batch": terms["expected_batch_size"],
        "optimizer": f"{optimizer.name}, betas {optimizer.beta1:g} and {optimizer.beta2:g}, "
        f"eps {optimizer.eps:g}, weight decay {optimizer.weight_decay:g}",
        "learning rate": f"{optimizer.lr:g}; warm-up {schedule.warmup_steps} steps, "
        f"{schedule.decay_type} decay to {schedule.min_lr_factor:g} of it",
        "precision": f"{training.mixed_precision_param}; {training.mixed_precision_reduce} "
        "reduction, norms and noise",
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""
## How it was trained

Settings of the run's last start. If they were tuned on the private data, see "Choosing among runs".

| | |
| --- | --- |
{lines}
"""


def _which(config: JobConfig, decays: tuple[Decay, ...]) -> str:
    """Say what an average of weights is of, and why it is covered."""
    decay = decays_in_words(decays)
    if decays == UNRECORDED:
        decay = f"as of the last start: {config.ema.decay}"
    return (
        "an exponential moving average of those that the average began with and those after each "
        f"step since (decay {decay}; at first (1 + t) / (10 + t)); it is computed from them alone, "
        "so that ε covers it"
    )


def _windows(terms: dict[str, Any]) -> str:
    """Say how many samples of a unit make up its gradient."""
    count = terms["windows_per_draw"]
    return "1" if count == 1 else f"up to {count}, whose gradients' mean is clipped as one"
