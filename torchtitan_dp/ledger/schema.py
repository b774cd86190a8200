"""Every key of `privacy.json`, once: its type, its value's origin, who may see it, its meaning.

Writing (`described`, `released`), reading, verification, release and documentation
(`docs/privacy_json.md`) follow from `PrivacyFile`. Format 1.

Guarantee:
    The keys of `KEYS` are written and no other, so that nothing leaves by `privacy.json` that is
    not described here; a release leaves out those that are not `released`. Nothing in it is
    computed from the content of records, nor from how long steps took. Where the planned steps were
    taken, nothing depends on how often the run was started, or on how many steps each start took.
"""

import json
import math
import os
import secrets
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from torchtitan_dp.base.process import has_type, source, versions, write_atomically
from torchtitan_dp.ledger.lineage import FORMAT, Lineage
from torchtitan_dp.ledger.spending import (
    assumptions,
    caveats,
    epsilon,
    explain,
    heldout_epsilon,
    recorded,
    spent,
    to_act_on,
)
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.meaning import Meaning
from torchtitan_dp.privacy.published_loss import HIDES
from torchtitan_dp.privacy.segments import NONE, Mechanism, Segment, composition, dp_event

PRIVACY_FILE = "privacy.json"
TRIAL_FILE = "trial.json"  # of a search's trial, from before its first start: the keys tried


_IN_RUNS, _IN_RELEASES = "of a run's own file alone", "of a release's alone"
_OF_SOME = "of some mechanisms alone"


class Key(NamedTuple):
    name: str
    type: Any  # of the value as JSON has it
    in_runs: bool  # whether a run's own file has it
    in_releases: bool
    optional: bool  # a key of some mechanisms alone


class PrivacyFile:
    """The keys of a `privacy.json`, in order, each with its type; some are in some files alone. The
    docstring below a key is its reference."""

    format: int
    """The version of this table: 1."""

    private: bool
    """Whether the weights are differentially private at all. Once false, it stays false for weights
    that go on from these."""

    epsilon: float | None
    """The ε of these weights; null if they are not private. In a run's own folder: of the steps
    that made them. In a release: the one that its model card quotes."""

    epsilon_counts: Annotated[str, _IN_RELEASES]
    """The steps that the released `epsilon` counts. `planned_steps`: it is `epsilon_planned`.
    `executed_steps`: it is `epsilon_executed`, since the owner stated that neither results nor a
    clock decided when to stop. `kept_and_planned_steps`, `kept_steps`: the same without lost steps,
    which the owner stated nobody saw."""

    epsilon_planned: float | None
    """The ε of every step ever begun and of those still planned, by the runs behind the initial
    weights too: it also holds if weights decided when to stop. No ε covers a stop that followed
    from losses."""

    epsilon_executed: float | None
    """The ε of every step ever begun in the folder (`steps_executed`), lost and abandoned ones
    included. Of an audited run, the cost of publishing the audit's result."""

    delta: float
    """δ: the probability that ε may fail to hold."""

    accountant: str
    """How ε is computed: `pld` or `rdp`."""

    mechanism: str
    """`poisson_sampled_gaussian`: each step adds Gaussian noise to the sum of the drawn units'
    clipped gradients. `poisson_sampled_gaussian_of_randomized_norms`: clipped by estimates of their
    norms, a mixture of Gaussians. `banded_gaussian_of_cyclic_poisson_sampling`: noise is correlated
    over steps, so that n steps in a row are ⌈n / bands⌉ subsampled Gaussian mechanisms.
    `gaussian_of_random_allocation`: each round counts as a whole. `none`: trained without
    privacy."""

    sampling: str
    """`poisson`: every unit is drawn at each step by a coin of its own. `cyclic_poisson`: every
    unit of one of `bands` groups, which take turns. `allocation`: every unit at exactly one step of
    each round of `round_steps`. `shuffled`: in batches of one size, which no ε here counts."""

    sample_rate: float
    """q: the probability that a unit is drawn at a step, on average over steps."""

    sample_rate_source: str
    """What q follows from."""

    noise_multiplier: float
    """σ: the standard deviation of the noise on each coordinate of the sum, over C; of correlated
    noise, over C times the norm of a column (docs/privacy.md)."""

    max_grad_norm: float
    """C: the norm that a unit's gradient is clipped to, or the estimate of this norm."""

    projections: int
    """From how many random projections norms were estimated, whose errors ε counts; 0: they were
    exact, or errors were capped."""

    capped_projections: int
    """From how many random projections norms were estimated, where a longer gradient is scaled down
    to its estimate, so that ε is that of exact norms. 0: none were, or ε counts their errors."""

    norm_estimator: str
    """How: `hutchinson`, `hutch++`, or, where both numbers are 0, `exact`."""

    round_steps: Annotated[int, _OF_SOME]
    """t: the steps of a round, at exactly one of which each unit is drawn. ε is of whole rounds."""

    bands: Annotated[int, _OF_SOME]
    """b: units are in b groups, of which each step draws from the next one with probability b q;
    noise is correlated over steps by a matrix of b bands."""

    column: Annotated[list[float], _OF_SOME]
    """c: the coefficients of these bands, chosen at the run's first start (docs/privacy.md); ε does
    not depend on them: noise is scaled by their norm."""

    clipping: str
    """`flat`: one norm over all parameters; `per_layer`: one for each layer or group, each clipped
    to its share of the same C."""

    clip_function: str
    """How a gradient g is scaled: `vanilla` by min(1, C / |g|), `automatic` by C / (|g| + 0.01)."""

    secure_noise: bool
    """Whether the noise resists attacks on its low bits (`privacy.secure_noise`)."""

    trained: str
    """What the steps changed: all weights, or the adapters of LoRA beside weights that stayed as
    they were when training started."""

    expected_batch_size: int
    """The expected number of units in a step, which the sum is divided by; public."""

    privacy_unit: str
    """What ε protects: one of these."""

    targets: str
    """Which tokens of a record are learned: a sample's loss is the mean over its own. ε protects
    the whole record, prompts included."""

    target_epsilon: float | None
    """The `privacy.target_epsilon` that σ followed from; null if it was given."""

    windows_per_draw: int
    """How many samples are taken of a unit that is drawn. Their gradients are averaged before the
    mean is clipped, so that ε is that of one."""

    neighbouring_relation: str
    """Which two data sets ε compares: `zero_out` (one unit's content replaced by an empty one) or
    `add_remove` (one unit more or less)."""

    units: int | None
    """The number of training units, which `zero_out` treats as public; null under `add_remove`,
    which does not."""

    samples_per_rank: int | None
    """A number of samples that hardly any draw exceeds on one rank in a step."""

    ranks_added_up: int
    """The number of ranks whose sums of gradients are added up."""

    steps: int
    """Optimizer steps of these weights, in this run."""

    planned_steps: int
    """The largest `training.steps` that this run was ever started with."""

    steps_executed: int
    """At least the number of steps ever begun in the folder: `steps`, for each crash the most that
    it can lose (`checkpoint.interval`, twice with asynchronous saves), and for each load of an
    older checkpoint the steps after it, in whole intervals."""

    heldout_loss: dict | None
    """The held-out loss that a run publishes at its end; null if it publishes none. `noised` is the
    step, the loss in nats and the standard deviation of its noise, `noise_multiplier` times `clip`
    / number of units. `begun` counts the losses ever published, or about to be when a crash
    came."""

    heldout_epsilon: float | None
    """The ε of all of them for one held-out unit, with one that is still planned, at
    `heldout_loss.delta`."""

    meaning: dict | None
    """What `epsilon_planned` (in a release: `epsilon`) means for one person: see below."""

    dp_event: dict | None
    """The steps that `epsilon_planned` (in a release: `epsilon`) counts, as an event of Google's
    dp-accounting (`DpEvent.to_named_tuple`). Null where a step has no noise."""

    caveats: list[str]
    """What ε rests on beyond what holds of every run; read each before you publish."""

    assumptions: list[str]
    """What ε of every run rests on."""

    ancestors: list[dict]
    """The runs that the initial weights come from: their terms, steps made, planned and lost, and
    published held-out losses. ε counts all of it."""

    audit: Annotated[dict | None, _IN_RUNS]
    """Of an audited run: how many canaries were trained on, and whether it would be private without
    them."""

    run: str
    """A random, public name of the run, followed in an export or a release by a slash and a random
    name of its own."""

    config_hash: str
    """SHA-256 of what was trained and how, without the places of records and outputs."""

    versions: dict
    """Versions of the libraries that ε rests on."""

    source: dict
    """The program: its version and, from a git checkout, its commit and whether files were changed
    since."""


def _key(name: str, hint: Any) -> Key:
    kind, mark = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, "")
    return Key(name, kind, mark != _IN_RELEASES, mark != _IN_RUNS, mark == _OF_SOME)


KEYS = tuple(_key(*one) for one in typing.get_type_hints(PrivacyFile, include_extras=True).items())


def is_release(content: Mapping[str, Any]) -> bool:
    """Return whether this is the content of a release's or an export's file, not of a run's."""
    return "epsilon_counts" in content


def kind(content: Mapping[str, Any]) -> str:
    """Return the kind of folder that a `privacy.json` with this content lies in."""
    if is_release(content):
        return "a release"
    if content["mechanism"] == NONE:
        return "a run without privacy"
    return "a run" if content["audit"] is None else "an audited run"


def _keys_in(content: Mapping[str, Any]) -> list[Key]:
    releases = is_release(content)
    kept = [key for key in KEYS if (key.in_releases if releases else key.in_runs)]
    return [key for key in kept if key.name in content or not key.optional]


# Writing.


def described(lineage: Lineage, taken: float, executed: float, planned: float) -> dict[str, Any]:
    """Return the content of a run's own `privacy.json`, by the epsilons of the steps taken, of all
    executed, and of all planned ones; infinite where there is no privacy."""
    steps = spent(lineage, lineage.left)
    return _content(lineage, (taken, executed, planned), steps, planned, {"epsilon": taken})


def released(
    lineage: Lineage,
    executed: float,
    planned: float,
    counts: str = "planned_steps",
    steps: list[Segment] | None = None,
    stated: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the `privacy.json` of weights that are released or exported, under a name of its own.

    Args:
        executed, planned: the epsilon of all executed steps, and of all planned ones.
        counts, steps: those that the release claims; by default all executed and planned ones.
        stated: the owner's statements, which become caveats.
    """
    taken = epsilon(lineage, lost=False) if lineage.composes else math.inf
    claimed = planned if steps is None else lineage.settings.compose(steps)
    steps = spent(lineage, lineage.left) if steps is None else steps
    named = replace(lineage, run=f"{lineage.run}/{secrets.token_hex(8)}")
    computed = {"epsilon": claimed, "epsilon_counts": counts}
    return _content(named, (taken, executed, planned), steps, claimed, computed, stated)


def _content(
    lineage: Lineage,
    epsilons: tuple[float, float, float],
    steps: list[Segment],
    explained: float,
    computed: dict[str, Any],
    stated: Sequence[str] = (),
) -> dict[str, Any]:
    taken, executed, planned = epsilons
    meant = explain(lineage, steps, explained)
    computed = {
        **computed,
        "format": FORMAT,
        "epsilon": computed["epsilon"] if lineage.private else None,
        "epsilon_planned": planned if lineage.composes else None,
        "epsilon_executed": executed if lineage.composes else None,
        "heldout_epsilon": heldout_epsilon(lineage) if lineage.private else None,
        "caveats": [*caveats(lineage, taken, planned), *stated],
        "meaning": None if meant is None else meant.to_json(),
        "dp_event": dp_event(composition(steps)) if lineage.composes else None,
        "assumptions": assumptions(lineage),
        "steps_executed": lineage.steps_executed,
        "versions": versions(),
        "source": source(),
    }
    kept = lineage.fields()
    values = {**kept.pop("settings"), **kept, **computed}
    content = {key.name: values[key.name] for key in _keys_in(values)}
    check(content)
    assert computed.keys() <= content.keys(), computed.keys() - content.keys()
    return content


def in_sentences(content: Mapping[str, Any]) -> list[str]:
    """Write the meaning of a `privacy.json` in plain English."""
    unit, meant = content["privacy_unit"].split()[0], Meaning.from_json(content["meaning"])
    return meant.sentences(unit, content["epsilon"], content["delta"])


def write_published(folder: str, content: Mapping[str, Any]) -> None:
    write_atomically(os.path.join(folder, PRIVACY_FILE), to_bytes(content))


def to_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def in_words(mechanism: Mechanism) -> list[str]:
    """Return how norms were estimated and how noise depends on earlier steps', for a console;
    nothing of exact norms and independent noise."""
    k, capped = mechanism.projections, mechanism.capped_projections
    norms = f"norms from {k or capped} projections" + (", capped" if capped else "")
    noise = f"noise correlated over steps, {mechanism.period} bands"
    return [*([norms] if k or capped else []), *([noise] if mechanism.period > 1 else [])]


def summary(content: dict[str, Any]) -> list[str]:
    """Return the lines that end a run's console, from its `privacy.json`."""
    stated = f"epsilon = {rounded_up(content['epsilon'])}" if content["private"] else "NOT private"
    if content["private"] and (lost := content["steps_executed"] - content["steps"]):
        stated = (
            f"epsilon = {rounded_up(content['epsilon_executed'])} with {lost} steps that crashes "
            f"may have lost, {rounded_up(content['epsilon'])} without"
        )
    elif content["private"] and content["epsilon_planned"] > content["epsilon"]:
        stated = (
            f"epsilon = {rounded_up(content['epsilon_planned'])} of all {content['planned_steps']} "
            f"planned steps, {rounded_up(content['epsilon'])} of the {content['steps']} taken"
        )
    loss, target = content["heldout_loss"], content["target_epsilon"]
    if content["private"] and target is not None and content["epsilon_planned"] > target:
        stated += f", above privacy.target_epsilon = {target:g}"
    how = "".join(f"{words}, " for words in in_words(Mechanism.from_fields(content)))
    lines = [
        f"privacy: {stated}, delta = {content['delta']:g} "
        f"(sigma = {content['noise_multiplier']:.4f}, q = {content['sample_rate']:.5f}, "
        f"C = {content['max_grad_norm']:g}, {how}{content['accountant']}; unit: one "
        f"{content['privacy_unit']}; neighbours: {content['neighbouring_relation']})"
    ]
    if content["private"] and content["meaning"] is not None:
        lines.append(in_sentences(content)[0])
    if content["private"] and loss is not None and loss["noised"]:
        step, noised, deviation = loss["noised"]
        lines.append(
            f"held-out loss to publish: {noised:.4f} after step {step}, with noise of standard "
            f"deviation {deviation:.2g}, clipped to {loss['clip']:g}; for a held-out unit epsilon "
            f"= {rounded_up(content['heldout_epsilon'])}, delta = {loss['delta']:g}"
        )
        if deviation <= HIDES and noised > loss["clip"] - 2 * deviation:
            lines.append(
                "warning: most held-out losses are clipped, so this is not the model's: raise "
                f"validation.publish_clip = {loss['clip']:g} in another run"
            )
    return [*lines, *(f"caveat: {caveat}" for caveat in to_act_on(content["caveats"]))]


# Reading.


def read_published(folder: str) -> Lineage | None:
    """Return the ledger of this folder's `privacy.json`, if any; ValueError if it is not ours."""
    content = read_published_fields(folder)
    return None if content is None else ledger_of(content)


def read_run(folder: str) -> dict[str, Any]:
    """Return the content of a run's own `privacy.json`; ValueError, one line, if that is not there,
    or is not ours."""
    content = read_published_fields(folder)
    if content is None or is_release(content):
        what = f"has no {PRIVACY_FILE}" if content is None else "is a release"
        raise ValueError(f"RUN = '{folder}' {what}: name the job.dump_folder of a run")
    return content


def read_published_fields(folder: str) -> dict[str, Any] | None:
    """Return the content of this folder's `privacy.json`, if any; ValueError if it is not ours."""
    path = Path(folder, PRIVACY_FILE)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        check(content)
        ledger_of(content)
    except (ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{path} cannot be read ({why}): restore it, or use the version that wrote it"
        ) from error
    return dict(content)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def check(content: Any) -> None:
    """Raise ValueError, for the end of a message that names the file, for a content that is no
    `privacy.json` of this format."""
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if (found := content.get("format")) != FORMAT:
        raise ValueError(f"its format is {found}, and this version of torchtitan_dp reads {FORMAT}")
    for key in _keys_in(content):
        if key.name not in content:
            raise ValueError(f"it lacks '{key.name}'")
        if not has_type(content[key.name], key.type):
            raise ValueError(f"'{key.name}' is {content[key.name]!r}")


def ledger_of(content: Mapping[str, Any]) -> Lineage:
    """Return the ledger of a `privacy.json` with this content; KeyError, TypeError or ValueError
    where it is none of ours."""
    kept = {one.name: content[one.name] for one in fields(Lineage) if one.name in content}
    return Lineage.from_fields(
        {"audit": None, **kept, "settings": content}
        | {"caveats": recorded(content["caveats"])}
        | {"lost": content["steps_executed"] - content["steps"]}
    )
