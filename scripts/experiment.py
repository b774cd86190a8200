"""What a private model is worth: pre-trains a small Llama on public text, tunes it on private text.

    python scripts/experiment.py --out FOLDER [--only NAME…] [--list]
    python scripts/experiment.py --report docs [--out FOLDER]

Everything runs on one CPU core, by the trainer's own command. A run that is done is not run again,
so that the same command goes on where it was cut off; each run's numbers are in
FOLDER/results/NAME.json. `--list` names all runs, and `--only` does those of a group (none, rates,
main, splits, bounds, windows, averages, bands), or whose names begin so. `--report docs` runs
nothing: it writes docs/results/runs.json and bands.json from FOLDER, if that is given (with `--only
bands` the latter alone), and from these files the figures and the tables of docs/results.md.
"""

import argparse
import sys
from pathlib import Path

from experiments import report, runs
from experiments.arms import arms


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for text, weights and numbers")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="groups, or what names begin with"
    )
    parser.add_argument("--list", action="store_true", help="name all runs, and do none")
    parser.add_argument(
        "--report", type=Path, metavar="DOCS", help="write tables and figures there"
    )
    options = parser.parse_args(argv)
    wanted = arms(options.only or [])
    if options.list:
        print("\n".join(arm.name for arm in wanted))
        return
    if options.report is not None:
        if options.out is not None:
            report.write(runs.Folder(options.out), options.report, options.only or ())
        report.render(options.report)
        return
    if options.out is None:
        parser.error("--out: name a folder")
    folder = runs.Folder(options.out)
    runs.prepare(folder)
    for arm in wanted:
        told = runs.do(folder, arm)
        print(f"{arm.name}: held-out loss {told['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
