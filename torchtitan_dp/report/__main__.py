"""Write one HTML page on a run, or print its status; nothing is loaded from a network.

    python -m torchtitan_dp.report RUN [--output FILE.html]
    python -m torchtitan_dp.report RUN --status

RUN is a `job.dump_folder`, also of a run that is training. The page is RUN/report.html, for its
owner: what is computed from records is marked "not private" there. With matplotlib it has charts,
without it tables.
"""

import datetime
import importlib.util
import io
import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("report", __doc__)

# isort: split
from torchtitan_dp.base.process import versions, write_atomically
from torchtitan_dp.config.load import exit_on_mistake, fail
from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.spending import epsilon as epsilon_of
from torchtitan_dp.ledger.spending import spent, to_act_on
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.meaning import templates
from torchtitan_dp.release.card import guarantee
from torchtitan_dp.report.run_folder import Points, RunFolder, finite, open_run, status_rows

_POINTS = 24  # of a curve of epsilon, as in torchtitan_dp.ledger
_DRAWN = 2000  # points of a line


def report(folder: str) -> str:
    """Return the page on a run; ValueError, one line, if there is none."""
    run = open_run(folder)
    here = Path(__file__).parent
    pages = templates(here, here.with_name("release"), html=True)
    return pages.get_template("page.html.j2").render(content(run))


def content(run: RunFolder) -> dict[str, Any]:
    """Return the values of the page."""
    charts = [*public_charts(run), *_charts_of_records(run)]
    for chart in charts:
        chart.public = chart.public and run.private
        chart.last = max(run.total, run.ledger.steps, 1)
    return {
        "private_run": run.private,
        "title": run.path.resolve().name,
        "rows": [row._replace(public=row.public and run.private) for row in status_rows(run)],
        "faults": run.faults,
        "notes": run.notes,
        "records": run.records,
        "charts": charts if importlib.util.find_spec("matplotlib") else [],
        "guarantee": _guarantee(run),
        "caveats": to_act_on(run.caveats),
        "assumptions": run.assumptions,
        "run": str(run.path),
        "versions": versions(),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M UTC}",
    }


@dataclass
class Chart:
    """Values over steps."""

    title: str
    unit: str
    lines: dict[str, Points]
    public: bool
    reference: tuple[str, float] | None = None
    logarithmic: bool = False
    last: int = 1  # step of the axis that all charts of a page have

    @property
    def svg(self) -> str:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.title}):
            figure = Figure(figsize=(5, 2.8), layout="constrained")
            axes = figure.subplots()
            for name, points in self.lines.items():
                value = points[-1][1]
                last = f"{name} {rounded_up(value) if self.public else format(value, '.5g')}"
                drawn = points[:: math.ceil(len(points) / _DRAWN)]
                axes.plot(*zip(*drawn, strict=True), "." if len(points) == 1 else "-", label=last)
            if self.reference is not None:
                name, value = self.reference
                axes.axhline(value, color="black", linestyle="--", label=f"{name} {value:g}")
            axes.set(xlabel="step", yscale="log" if self.logarithmic else "linear")
            axes.set_xlim(-0.02 * self.last, 1.02 * self.last)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend(fontsize="small")
            axes.grid(alpha=0.3)
            unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(buffer, format="svg", metadata=unsaid)
        _, svg, text = buffer.getvalue().partition("<svg")
        return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg + text)  # which HTML does not need


def public_charts(run: RunFolder) -> list[Chart]:
    """Return the charts that follow from the ledger and the number of steps alone."""
    ledger, settings = run.ledger, run.ledger.settings
    if not (ledger.composes and run.with_privacy):
        return []

    def curve(last: int, *, lost: bool) -> Points:
        at = sorted({round(last * i / _POINTS) for i in range(_POINTS + 1)})
        return [(n, epsilon_of(replace(ledger, steps=n), lost=lost)) for n in at]

    lines = {"of these weights": curve(ledger.steps, lost=False)}
    if ledger.lost or ledger.steps < run.total:
        lines["with lost and planned steps"] = curve(max(run.total, ledger.steps), lost=True)
    target = None if settings.target_epsilon is None else ("target", settings.target_epsilon)
    return [Chart("ε over steps", f"at δ = {settings.delta:g}", lines, True, target)]


_LOSSES = {"loss": "training", "heldout_loss": "held out", "heldout_loss_ema": "average"}
_NORMS = {"norm_p10": "10%", "norm_p50": "median", "norm_p90": "90%"}
_COUNTS = {"realized_batch_size": "drawn", "rejected": "left out"}
_OF_RECORDS = (
    ("Loss", "", _LOSSES),
    ("Clipped share", "of a step's samples", {"clipped_fraction": "clipped"}),
    ("Gradient norms", "of samples, before clipping", _NORMS),
    ("Realized batch", "samples", _COUNTS),
)


def _charts_of_records(run: RunFolder) -> list[Chart]:
    terms, charts = run.ledger.settings, []
    references = {
        "Gradient norms": ("C", terms.max_grad_norm),
        "Realized batch": ("expected", float(terms.expected_batch_size)),
    }
    for title, unit, names in _OF_RECORDS:
        lines = {name: finite(run.scalars.get(key, [])) for key, name in names.items()}
        lines = {name: points for name, points in lines.items() if points}
        reference = references.get(title) if run.with_privacy else None
        if lines:
            charts.append(Chart(title, unit, lines, False, reference, title == "Gradient norms"))
    return charts


def _guarantee(run: RunFolder) -> dict[str, Any] | None:
    """Return the values of the sentences that the model card has too, for the epsilon at the end;
    None where there is no epsilon."""
    ledger, epsilon, meant = run.ledger, run.epsilon_planned, run.published["meaning"]
    if not run.private or epsilon is None or not math.isfinite(epsilon):
        return None
    if epsilon != run.published["epsilon_planned"] or meant is None:
        if (meaning := schema.explain(ledger, spent(ledger, ledger.left), epsilon)) is None:
            return None
        meant = meaning.to_json()
    terms = run.published | {"epsilon": epsilon, "meaning": meant}
    return guarantee(terms, run.config) | {"terms": terms}


def main(argv: list[str]) -> None:
    options, _ = parsed("report", __doc__, argv)
    if options.status and options.output:
        fail("--status: it writes no page; omit --output")
    with exit_on_mistake():
        if options.status:
            run = open_run(options.run)
            rows = status_rows(run)
            width = max(len(row.name) for row in rows)
            print(options.run)
            for row in rows:
                label = "" if row.public else "  (not private)"
                print(f"  {row.name:{width}}  {row.value}{label}")
            print("".join(f"  FAULT: {fault}\n" for fault in run.faults), end="")
            return
        path = options.output or os.path.join(options.run, "report.html")
        if not path.endswith(".html") or os.path.isdir(path):
            raise ValueError(f"--output = '{path}': name a file that ends in .html")
        page = report(options.run)
        try:
            write_atomically(path, page.encode())
        except OSError as error:
            raise ValueError(f"--output = '{path}': cannot be written ({error})") from error
    print(f"report: {path} (NOT PRIVATE: do not publish it)")


if __name__ == "__main__":
    main(sys.argv[1:])
