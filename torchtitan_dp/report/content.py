"""The content of the page, and what of it may be published.

Guarantee:
    A public page has the values that `public_content` and `public_charts` name one by one, and no
    other: the released keys of `privacy.json` that they read, curves of the ledger, the learning
    rate up to the last published step, and settings of `PUBLIC_SETTINGS` that are numbers or words
    of the schema. No path, text of the user's or scalar of another name gets there. A run that is
    not private has no public page.
"""

import datetime
import math
import typing
from dataclasses import replace
from typing import Any, NamedTuple

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.spending import epsilon as epsilon_of
from torchtitan_dp.ledger.spending import spent
from torchtitan_dp.plan.signal import DROWNS, Noise, noise_of_run
from torchtitan_dp.privacy.accounting import rounded_down, rounded_up
from torchtitan_dp.privacy.meaning import Meaning
from torchtitan_dp.process import versions
from torchtitan_dp.release.card import guarantee
from torchtitan_dp.report.charts import SECONDS, Chart, Line, Points, ScalarHistory
from torchtitan_dp.report.run_folder import Row, RunFolder, epsilon_rows, status_rows

_POINTS = 24  # of a curve of epsilon, as in torchtitan_dp.ledger
_COLOURS = ("c1", "c2", "c3")

PUBLIC_SETTINGS = {
    "training": "seq_len local_batch_size global_batch_size steps mixed_precision_param "
    "mixed_precision_reduce",
    "privacy": "target_epsilon delta max_grad_norm accountant clipping clip_function "
    "gradient_method secure_noise projections",
    "optimizer": "lr beta1 beta2 eps weight_decay",
    "lr_scheduler": "warmup_steps decay_ratio decay_type min_lr_factor",
    "data": "unit_sampling long_records windows_per_draw heldout_fraction length_buckets",
    "lora": "rank alpha",
    "ema": "enable decay",
}
"""Settings that a public page shows, by section."""

_TABLE = {
    "delta": "δ",
    "noise_multiplier": "σ, noise over C",
    "sample_rate": "q, sampling rate",
    "max_grad_norm": "C, clip norm",
    "clipping": "clipping",
    "clip_function": "clip function",
    "accountant": "accountant",
    "neighbouring_relation": "neighbouring data sets",
    "privacy_unit": "privacy unit",
    "trained": "trained",
    "targets": "targets",
    "expected_batch_size": "expected batch",
    "secure_noise": "noise safe in its low bits",
}
"""Keys of `privacy.json` that the page shows, with their names there."""
assert _TABLE.keys() <= {key.name for key in schema.KEYS if key.in_releases}


def public_content(run: RunFolder) -> dict[str, Any]:
    """Return the values of a public page.

    Raises:
        ValueError: one line; nothing of the run may be published, or its files disagree.
    """
    if not run.private or run.epsilon_planned is None:
        raise ValueError(
            f"--public: RUN = '{run.path}' is NOT private, so that nothing of it may be published; "
            "omit --public for a page of your own"
        )
    if run.faults:
        raise ValueError(
            f"--public: RUN = '{run.path}': {'; '.join(run.faults)}: restore its files as the run "
            "wrote them"
        )
    return _of_both(run) | {
        "public": True,
        "title": f"run {run.ledger.run}",
        "rows": [Row("step", f"{run.ledger.steps:,} of {run.total:,}", True), *epsilon_rows(run)],
        "charts": public_charts(run),
        "settings": _public_settings(run),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
    }


def private_content(run: RunFolder) -> dict[str, Any]:
    charts = [*public_charts(run), *_charts_of_records(run)]
    for chart in charts:
        chart.public = chart.public and run.private
    return _of_both(run) | {
        "public": False,
        "title": run.path.resolve().name,
        "rows": [replace(row, public=row.public and run.private) for row in status_rows(run)],
        "charts": [chart for chart in charts if not chart.empty],
        "settings": [
            (f"{section}.{key}", value)
            for section, values in run.settings.items()
            for key, value in (values.items() if isinstance(values, dict) else ())
        ],
        "faults": run.faults,
        "notes": run.notes,
        "records": run.records,
        "outputs": _outputs(run),
        "run": str(run.path),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M UTC}",
    }


def _of_both(run: RunFolder) -> dict[str, Any]:
    """Return the values of either page, all of which may be published if the run is private."""
    return {
        "private_run": run.private,
        "terms": _terms(run),
        "guarantee": _guarantee(run),
        "caveats": run.caveats,
        "assumptions": run.assumptions,
        "versions": versions(),
    }


def public_charts(run: RunFolder) -> list[Chart]:
    """Return the charts that follow from the ledger, the settings and the number of steps alone."""
    charts = []
    if run.ledger.composes and run.with_privacy:
        charts.append(_epsilon_chart(run))
    if run.with_privacy and run.trained and run.total:
        charts.append(_noise_chart(run, run.trained))
    rates = [p for p in run.scalars.of("lr").kept if p.step <= run.ledger.steps]
    line = Line("learning rate", [(p.step, p.value) for p in rates], "c1", _last(rates))
    charts.append(Chart("Learning rate", "", [line], public=True, from_zero=True))
    return [chart for chart in charts if not chart.empty]


def _epsilon_chart(run: RunFolder) -> Chart:
    """Draw epsilon at each step: that of the weights, and with all lost steps."""
    ledger, steps, total = run.ledger, run.ledger.steps, max(run.total, run.ledger.steps)

    def curve(first: int, last: int, *, all_begun: bool) -> Points:
        at = sorted({first + round((last - first) * i / _POINTS) for i in range(_POINTS + 1)})
        begun = replace(spent(ledger, lost=all_begun), done=0)
        return [(n, epsilon_of(begun, ledger.settings, n)) for n in at]

    lines = [Line("of these weights", found := curve(0, steps, all_begun=False), "c1")]
    lines[0] = replace(lines[0], last=rounded_up(found[-1][1]))
    if ledger.lost:
        begun = curve(0, steps, all_begun=True)
        lines.append(Line("of all steps begun", begun, "c2", rounded_up(begun[-1][1])))
    if steps < total:
        coming = curve(steps, total, all_begun=True)
        lines.append(Line("planned", coming, "coming", rounded_up(coming[-1][1])))
    if (target := ledger.settings.target_epsilon) is not None:
        lines.append(Line("target", [(0, target), (total, target)], "reference", f"{target:g}"))
    return Chart("ε over steps", f"at δ = {ledger.settings.delta:g}", lines, True, from_zero=True)


def _noise_chart(run: RunFolder, trained: int) -> Chart:
    """Draw the noise's norm in the mean over the steps so far, beside the most that gradients have
    there."""
    settings, total = run.ledger.settings, run.total
    at = sorted({max(1, round(total ** (i / 40))) for i in range(41)})

    def noise(steps: int) -> Noise:
        batch = settings.expected_batch_size
        return noise_of_run(settings.mechanism, trained=trained, batch=batch, steps=steps)

    curve = [(n, noise(n).over_run) for n in at]
    lines = [
        Line("noise", curve, "c1", f"{curve[-1][1]:.3g} C"),
        Line("largest signal", [(1, 1.0), (total, 1.0)], "reference", "1 C"),
        Line("little is learned above (a heuristic)", [(1, DROWNS), (total, DROWNS)], "lost"),
    ]
    unit = "norm over C, averaged over the steps so far"
    words = noise(total).describe(trained, settings.clipping)
    return Chart("Signal against noise", unit, lines, True, logarithmic=True, words=words)


class _OfRecords(NamedTuple):
    """A chart of what is computed from records."""

    title: str
    unit: str
    names: dict[str, str]  # in the page, by scalar
    reference: tuple[str, str] | None = None  # a line's name, and the field of the settings
    from_zero: bool = True
    logarithmic: bool = False


_LOSSES = {"loss": "training", "heldout_loss": "held out", "heldout_loss_ema": "average"}
_NORMS = {"norm_p10": "10%", "norm_p50": "median", "norm_p90": "90%"}
_COUNTS = {"realized_batch_size": "drawn", "rejected": "left out"}
_MEMORY = {"memory/max_active(GiB)": "active", "memory/max_reserved(GiB)": "reserved"}
_BOUND, _EXPECTED = ("C", "max_grad_norm"), ("expected", "expected_batch_size")
_CHARTS = (
    _OfRecords("Loss", "", _LOSSES, from_zero=False),
    _OfRecords("Clipped share", "of a step's samples", {"clipped_fraction": "clipped"}),
    _OfRecords("Gradient norms", "of samples, before clipping", _NORMS, _BOUND, False, True),
    _OfRecords("Realized batch", "samples", _COUNTS, _EXPECTED),
    _OfRecords("Throughput", "tokens/s a device", {"throughput(tps)": "tokens/s"}),
    _OfRecords("Memory", "GiB", _MEMORY),
    _OfRecords("Time a step", "s, saves and validation included", {SECONDS: "seconds"}),
)


def _charts_of_records(run: RunFolder) -> list[Chart]:
    charts = []
    for chart in _CHARTS:
        scalars = [(name, run.scalars.of(key)) for key, name in chart.names.items()]
        lines = _lines([(name, scalar) for name, scalar in scalars if scalar.kept])
        if chart.reference and lines and run.with_privacy:
            last = max(x for line in lines for x, _ in line.points)
            name, term = chart.reference
            value = float(getattr(run.ledger.settings, term))
            lines.append(Line(name, [(0, value), (last, value)], "reference", f"{value:g}"))
        zero, starts = chart.from_zero, run.scalars.starts[1:]
        charts.append(Chart(chart.title, chart.unit, lines, False, chart.logarithmic, zero, starts))
    return charts


def _lines(scalars: list[tuple[str, ScalarHistory]]) -> list[Line]:
    """Draw what was kept of scalars, and what was lost."""
    lines = [
        Line(name, [(p.step, p.value) for p in scalar.kept], colour, _last(scalar.kept))
        for colour, (name, scalar) in zip(_COLOURS, scalars, strict=False)
    ]
    lost = [[(p.step, p.value) for p in part] for _, scalar in scalars for part in scalar.lost]
    return [*lines, *(Line("" if n else "lost steps", part, "lost") for n, part in enumerate(lost))]


def _last(points: Any) -> str:
    return f"{points[-1].value:.4g}" if points else ""


def _terms(run: RunFolder) -> list[tuple[str, str]]:
    """Return the terms of the guarantee, none rounded in its own favour."""
    if not run.with_privacy:
        return []
    rounded = {"noise_multiplier": rounded_down, "sample_rate": rounded_up}
    found = []
    for key, name in _TABLE.items():
        if (value := run.published[key]) is not None:
            shown = rounded[key](value, 6) if key in rounded else _word(value)
            found.append((name, shown))
    if run.published["units"] is not None:
        found.append(("units in training, public", f"{run.published['units']:,}"))
    return found


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _guarantee(run: RunFolder) -> dict[str, Any] | None:
    """Return the values of the sentences that the model card has too, for the epsilon at the end;
    None where there is no epsilon."""
    epsilon = run.epsilon_planned
    if not run.private or epsilon is None:
        return None
    if epsilon == run.published["epsilon_planned"] and run.published["meaning"] is not None:
        meaning: Meaning | None = Meaning.from_json(run.published["meaning"])
    else:
        ledger = run.ledger
        steps = spent(ledger).segments(ledger.settings.mechanism, ledger.left)
        meaning = schema.explain(run.ledger, steps, epsilon)
    if meaning is None or not math.isfinite(epsilon):
        return None
    terms = run.published | {"epsilon": epsilon, "meaning": meaning.to_json()}
    return guarantee(terms, run.config) | {"terms": terms}


def _public_settings(run: RunFolder) -> list[tuple[str, str]]:
    """Return the settings of the allow-list whose values are numbers or words of the schema."""
    found = []
    for section, keys in PUBLIC_SETTINGS.items() if run.config is not None else ():
        part = getattr(run.config, section)
        types = typing.get_type_hints(type(part))
        for key in keys.split():
            value, words = getattr(part, key), _literals(types[key])
            if isinstance(value, bool | int | float) or value in words:
                found.append((f"{section}.{key}", _word(value)))
    return found


def _literals(kind: Any) -> tuple[str, ...]:
    """Return the words that a type allows; none of a free text."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    return tuple(word for part in typing.get_args(kind) for word in _literals(part))


def _outputs(run: RunFolder) -> list[tuple[str, str]]:
    """List what lies in the folder, and whether it may be published."""
    public = {"privacy.json", "hf", "report_public.html"} if run.private else set()
    there = sorted(entry.name for entry in run.path.iterdir() if not entry.name.startswith("."))
    return [(name, "yes" if name in public else "no") for name in there]
