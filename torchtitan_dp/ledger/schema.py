"""Every key of `privacy.json`, once: its type, its value's origin, who may see it, what it means.

Writing (`assemble`), reading (`check`), verification, release and documentation
(`docs/privacy_json.md`) follow from `PrivacyFile`. Format 1.

Guarantee:
    `assemble` writes the keys of `KEYS` and no other, so that nothing leaves by `privacy.json` that
    is not described here; a release leaves out those that are not `released`.
"""

import enum
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torchtitan_dp.ledger.lineage import FORMAT, Lineage


class Origin(enum.Enum):
    """The source of a key's value."""

    SETTINGS = "an attribute of the run's `Settings`"
    MECHANISM = "a number of its mechanism (`Mechanism.fields`); files of others may lack it"
    LEDGER = "an attribute of the `Lineage`"
    ACCOUNT = "computed when the file is written"
    RELEASE = "computed when a release is made; a run's own file lacks it"


@dataclass(frozen=True)
class Key:
    """One key of `privacy.json`."""

    name: str
    type: Any  # of the value as JSON has it
    origin: Origin
    released: bool = True
    meaning: str = ""  # of a mechanism's key; of others, the docstring in `PrivacyFile`


_SETTINGS, _MECHANISM, _LEDGER, _ACCOUNT, _RELEASE = Origin
_NUMBER = int | float
_NOT_RELEASED = "not released"


class PrivacyFile:
    """The keys of a `privacy.json`, in order, each with its type, origin and mark ("not released").
    The docstring below a key is its reference. Those of the mechanism follow `max_grad_norm`."""

    format: Annotated[int, _ACCOUNT]
    """The version of this table: 1."""

    private: Annotated[bool, _LEDGER]
    """Whether the weights are differentially private at all. Once false, it stays false for weights
    that go on from these."""

    epsilon: Annotated[_NUMBER | None, _ACCOUNT]
    """The ε of these weights; null if they are not private. In a run's own folder: of every step of
    their lineage, if neither results nor a clock decided when to stop. In a release: the ε that its
    model card quotes."""

    epsilon_counts: Annotated[str, _RELEASE]
    """The steps that the released `epsilon` counts. `planned_steps`: it is `epsilon_planned`.
    `executed_steps`: it is `epsilon_executed`, since the owner stated that neither results nor a
    clock decided when to stop. `kept_and_planned_steps`, `kept_steps`: the same without lost steps,
    since the owner stated that nobody saw anything of them."""

    epsilon_planned: Annotated[_NUMBER | None, _ACCOUNT]
    """The ε of every step ever begun and of those still planned, by the runs behind the initial
    weights too: it also holds if weights decided when to stop. No ε covers a stop that followed
    from losses, norms or other logs."""

    epsilon_executed: Annotated[_NUMBER | None, _ACCOUNT]
    """The ε of every step ever begun in the folder (`steps_executed`), lost and abandoned ones
    included. Of an audited run, the cost of publishing the audit's result."""

    delta: Annotated[_NUMBER, _SETTINGS]
    """δ: the probability that ε may fail to hold."""

    accountant: Annotated[str, _SETTINGS]
    """How ε is computed: `pld` or `rdp`."""

    mechanism: Annotated[str, _SETTINGS]
    """`poisson_sampled_gaussian`: each step adds Gaussian noise to the sum of the clipped gradients
    of the units that were drawn. `poisson_sampled_gaussian_of_randomized_norms`: the same, of
    gradients clipped by estimates of their norms, so that each step is a mixture of Gaussians.
    `banded_gaussian_of_cyclic_poisson_sampling`: noise is correlated over steps, so that n steps in
    a row are ⌈n / bands⌉ subsampled Gaussian mechanisms. `gaussian_of_random_allocation`: units are
    drawn by rounds (`sampling`), each of which counts as a whole. `none`: trained without
    privacy."""

    sampling: Annotated[str, _SETTINGS]
    """`poisson`: every unit is drawn at each step by a coin of its own. `cyclic_poisson`: every
    unit of one of `bands` groups, which take turns. `allocation`: every unit is drawn at exactly
    one step of each round of `round_steps`, uniformly and by itself. `shuffled`: in batches of one
    size, which no ε here counts."""

    sample_rate: Annotated[_NUMBER, _SETTINGS]
    """q: the probability that a unit is drawn at a step, on average over steps."""

    sample_rate_source: Annotated[str, _SETTINGS]
    """What q follows from."""

    noise_multiplier: Annotated[_NUMBER, _SETTINGS]
    """σ: the standard deviation of the noise on each coordinate of the sum, over C; of correlated
    noise, over C times the norm of a column (docs/privacy.md)."""

    max_grad_norm: Annotated[_NUMBER, _SETTINGS]
    """C: the norm that a unit's gradient is clipped to, or the estimate of this norm."""

    clipping: Annotated[str, _SETTINGS]
    """`flat`: one norm over all parameters; `per_layer`: one for each layer or group, each clipped
    to its share of the same C."""

    clip_function: Annotated[str, _SETTINGS]
    """How a gradient g is scaled: `vanilla` by min(1, C / |g|), `automatic` by C / (|g| + 0.01)."""

    secure_noise: Annotated[bool, _SETTINGS]
    """Whether the noise resists attacks on its low bits (`privacy.secure_noise`)."""

    trained: Annotated[str, _SETTINGS]
    """What the steps changed: all weights, or the adapters of LoRA beside weights that stayed as
    they were when training started."""

    rope: Annotated[str, _SETTINGS]
    """What `[rope]` changed of the rotary embeddings: `as given`, nothing. ε does not depend on it;
    the weights serve no other embeddings."""

    expected_batch_size: Annotated[int, _SETTINGS]
    """The expected number of units in a step, which the sum is divided by; public."""

    privacy_unit: Annotated[str, _SETTINGS]
    """What ε protects: one of these."""

    targets: Annotated[str, _SETTINGS]
    """Which tokens of a record are learned: a sample's loss is the mean over its own. ε protects
    the whole record, prompts included."""

    target_epsilon: Annotated[_NUMBER | None, _SETTINGS]
    """The `privacy.target_epsilon` that σ followed from; null if it was given."""

    windows_per_draw: Annotated[int, _SETTINGS]
    """How many samples are taken of a unit that is drawn. Their gradients are averaged before the
    mean is clipped, so that ε is that of one."""

    neighbouring_relation: Annotated[str, _SETTINGS]
    """Which two data sets ε compares: `zero_out` (one unit's content replaced by an empty one) or
    `add_remove` (one unit more or less)."""

    units: Annotated[int | None, _SETTINGS]
    """The number of training units, which `zero_out` treats as public; null under `add_remove`,
    which does not."""

    samples_per_rank: Annotated[int | None, _SETTINGS]
    """A number of samples that hardly any draw exceeds on one rank in a step."""

    ranks_added_up: Annotated[int, _SETTINGS]
    """The number of ranks whose sums of gradients are added up."""

    steps: Annotated[int, _LEDGER]
    """Optimizer steps of these weights, in this run."""

    planned_steps: Annotated[int, _LEDGER]
    """The largest `training.steps` that this run was ever started with."""

    steps_executed: Annotated[int, _ACCOUNT]
    """At least the number of steps ever begun in the folder: `steps`, for each crash the most that
    it can lose (`checkpoint.interval`, twice with asynchronous saves, or all steps if they are
    fewer), and for each load of an older checkpoint the steps after it, in whole intervals. How
    many a crash did lose follows from how long steps took, and so from the lengths of records."""

    heldout_losses: Annotated[dict | None, _LEDGER]
    """Held-out losses that may be published (`validation.publish_epsilon`); null if there are none.
    `losses` lists step, loss in nats, and the standard deviation of its noise, of each: the mean
    over held-out units of their losses, clipped to [0, `clip`], with `noise` of `scale` over
    `clip` / number of units. `lost` counts evaluations beside those, as `steps_executed` does."""

    heldout_epsilon: Annotated[_NUMBER | None, _ACCOUNT]
    """The ε of all of them for one held-out unit, with those still planned and those lost, at
    `heldout_losses.delta`. Held-out units are not trained on, so that a unit pays this or
    `epsilon`, the larger of the two at most."""

    meaning: Annotated[dict | None, _ACCOUNT]
    """What `epsilon_planned` (in a release: `epsilon`) means for one person: see below."""

    dp_event: Annotated[dict | None, _ACCOUNT]
    """The steps that `epsilon_planned` (in a release: `epsilon`) counts, as an event of Google's
    dp-accounting (the fields of `DpEvent.to_named_tuple`), so that anybody can account for them
    again. Null where a step has no noise."""

    caveats: Annotated[list[str], _ACCOUNT]
    """What ε rests on beyond what holds of every run; read each before you publish."""

    assumptions: Annotated[list[str], _ACCOUNT]
    """What ε of every run rests on."""

    step_names: Annotated[str, _ACCOUNT]
    """A random name for each of `steps`, in order, so that a step that several files list counts
    once. Names do not show which steps one start of the trainer took."""

    ancestors: Annotated[list[dict], _LEDGER]
    """The runs that the initial weights come from: their terms, the names of the steps that made
    the weights, and how many steps they planned and lost. `any_begun`: lost steps, too, may have
    made them."""

    audit: Annotated[dict | None, _LEDGER, _NOT_RELEASED]
    """Of an audited run: how many canaries were trained on, and whether it would be private without
    them."""

    run: Annotated[str, _LEDGER]
    """A random, public name of the run."""

    config_hash: Annotated[str, _LEDGER]
    """SHA-256 of what was trained and how, without the places of records and outputs."""

    versions: Annotated[dict, _ACCOUNT]
    """Versions of the libraries that ε rests on."""

    source: Annotated[dict, _ACCOUNT]
    """The program: its version and, from a git checkout, its commit and whether files were changed
    since."""


_OF_MECHANISMS = tuple(
    Key(name, of, _MECHANISM, meaning=text)
    for name, of, text in (
        (
            "projections",
            int,
            "From how many random projections norms were estimated, whose errors ε counts; 0: they "
            "were exact, or errors were capped, so that a unit counts C at most.",
        ),
        (
            "capped_projections",
            int,
            "From how many random projections norms were estimated, where a gradient that is "
            "longer than its estimate is scaled down to it: a unit counts C at most whatever the "
            "errors are, so that ε is that of exact norms. 0: none were, or ε counts their errors.",
        ),
        (
            "norm_estimator",
            str,
            "How: `hutchinson`, `hutch++`, or, where both numbers are 0, `exact`.",
        ),
        (
            "round_steps",
            int,
            "t: the steps of a round, at exactly one of which each unit is drawn. ε is of whole "
            "rounds.",
        ),
        (
            "bands",
            int,
            "b: units are in b groups, of which each step draws from the next one, each unit with "
            "probability b q; noise is correlated over steps by a matrix of b bands.",
        ),
        (
            "column",
            list[float],
            "c: the coefficients of these bands, chosen at the run's first start "
            "(docs/privacy.md); ε does not depend on them: noise is scaled by their norm.",
        ),
    )
)


def _keys() -> Iterator[Key]:
    for name, hint in typing.get_type_hints(PrivacyFile, include_extras=True).items():
        origin, *marks = hint.__metadata__
        yield Key(name, hint.__origin__, origin, released=_NOT_RELEASED not in marks)
        if name == "max_grad_norm":
            yield from _OF_MECHANISMS


KEYS = tuple(_keys())


def names(*origins: Origin, released: bool | None = None) -> tuple[str, ...]:
    """Return the names of the keys of these origins, or of all; `released` restricts them."""
    return tuple(
        key.name
        for key in KEYS
        if (not origins or key.origin in origins) and released in (None, key.released)
    )


def terms_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms in a file, those of its mechanism included."""
    return {name: content[name] for name in names(_SETTINGS, _MECHANISM) if name in content}


def assemble(
    lineage: Lineage, computed: Mapping[str, Any], *, release: bool = False
) -> dict[str, Any]:
    """Return the whole content of a `privacy.json`, in the order of `KEYS`.

    Args:
        computed: of every key of `Origin.ACCOUNT`, for a release also `Origin.RELEASE`; no other.
    """
    values = {**computed, "format": FORMAT}
    expected = set(names(_ACCOUNT, _RELEASE) if release else names(_ACCOUNT))
    assert set(values) == expected, set(values) ^ expected
    kept = lineage.fields()
    terms = kept["settings"]
    found = {_SETTINGS: terms, _MECHANISM: terms, _LEDGER: kept, _ACCOUNT: values, _RELEASE: values}
    content = {}
    for key in KEYS:
        if key.origin is _RELEASE and not release:
            continue
        if key.origin is _MECHANISM and key.name not in terms:
            continue
        value = found[key.origin][key.name]
        assert fits(value, key.type), (key.name, value)
        if key.released or not release:
            content[key.name] = value
    return content


def check(content: Any) -> None:
    """Refuse the content of a file that is no `privacy.json` of this format.

    Raises:
        ValueError: the fault, for the end of a message that names the file.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if content.get("format") != FORMAT:
        found = content.get("format", "one that had no number yet")
        raise ValueError(
            f"its format is {found}, and this version of torchtitan_dp reads format {FORMAT}"
        )
    release = is_release(content)
    for key in KEYS:
        if key.origin is _RELEASE or (release and not key.released):
            continue
        if key.origin is _MECHANISM and key.name not in content:
            continue
        if key.name not in content:
            raise ValueError(f"it lacks '{key.name}'")
        if not fits(content[key.name], key.type):
            raise ValueError(f"'{key.name}' is {content[key.name]!r}")


def is_release(content: Mapping[str, Any]) -> bool:
    """Return whether this is the content of a release's file, not of a run's."""
    return any(name in content for name in names(_RELEASE))


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value, as JSON or as Python has it, is of a type.

    >>> fits(1, int | float), fits(True, int), fits(None, str | None), fits([1], list[str])
    (True, False, True, False)
    """
    if isinstance(kind, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        (inside,) = typing.get_args(kind)
        return isinstance(value, list | tuple) and all(fits(one, inside) for one in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float and isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, kind)
