"""Tokenize the records of a configuration; units, tokens, and what a sequence length cuts off.

    torchtitan-dp prepare MY.toml [--section.key value …] [--json FILE] [--show N [--training]]
    torchtitan-dp prepare --list | --delete NAME … [--data.store FOLDER]

Everything that is printed depends on private records, and is labelled so: it is for their owner.
"""

import argparse
import os
import sys
import time
from typing import Any, TextIO

from torchtitan_dp.base.process import printable, say, warn
from torchtitan_dp.config.commands import parse_known, tool_parser
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, load_config, results, write_json
from torchtitan_dp.data import store as stores


def main(argv: list[str]) -> None:
    """Prepare the records of a configuration, or list and erase stores."""
    os.umask(0o077)  # its files have figures that are not private
    with exit_on_mistake():
        options, overrides = _parse(argv)
        try:
            if options.list or options.delete:
                _manage(options)
            else:
                _prepare(options, overrides)
        except OSError as error:
            raise ValueError(f"{error.filename}: cannot be written ({error.strerror})") from error


def _prepare(options: argparse.Namespace, overrides: list[str]) -> None:
    if options.store is not None:
        overrides.append(f"--data.store={options.store}")
    config = load_config(overrides, 1)
    # PyTorch, which takes seconds to import: after all that needs none.
    from torchtitan_dp.data.dataset import describe
    from torchtitan_dp.train.check import build_samples, open_records

    records = open_records(config)
    samples = build_samples(records, config)
    warnings = records.warnings + records.check_targets(samples)
    found = records.figures(samples)
    if options.json:
        write_json(options.json, found)
    for warning in warnings:
        warn(warning)
    out = results(options.json)
    for line in describe(found, unit_word(config)):
        say(line, out=out)
    if options.show is not None:
        _show(records, samples, options.show, out, of_training=options.training)


def _show(records: Any, samples: Any, count: int, out: TextIO, *, of_training: bool) -> None:
    """Print samples of units as the model gets them, decoded, targets marked. NOT PRIVATE."""
    import numpy as np

    from torchtitan_dp.data.batching import FIXED_KEY, RecordLoader

    of_training = of_training or not len(records.heldout)
    units = records.train if of_training else records.heldout
    if count < 1:
        raise ValueError(f"--show = {count}: must be 1 or more samples")
    loader = RecordLoader(samples, units, ranks=1, rank=0, batch_size=1)
    lengths = samples.store.lengths()[samples.units.members]
    marks = ("\x1b[32m", "\x1b[0m") if out.isatty() else ("⟦", "⟧")
    which = f"{len(units):,} {'training' if of_training else 'held-out'} units"
    say(f"{min(count, len(units)):,} of the {which}; {''.join(marks)} marks the targets", out=out)
    for place, unit in enumerate(units[:count].tolist()):
        ids = samples.ids(unit, loader.rng(FIXED_KEY, place))
        targets = (ids >= 0) & (np.arange(len(ids)) > 0)
        whole = int(lengths[samples.units.places(unit)].sum())
        of_unit = f"{len(ids):,} of its unit's {whole:,} tokens"
        say(f"sample {place + 1}: {of_unit}; {targets.sum():,} are targets", out=out)
        for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(targets)) + 1):
            found = ids[part]
            ids_of = np.where(found < 0, ~found, found).tolist()
            text = records.source.tokenizer.decode(ids_of, marked=True)
            text = "\n".join(map(printable, text.split("\n")))
            print(text.join(marks) if targets[part].any() else text, end="", file=out)
        print(file=out)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = tool_parser("torchtitan-dp prepare [CONFIG]", __doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - is stdout")
    parser.add_argument("--show", type=int, metavar="N", help="print the text of N held-out units")
    parser.add_argument("--training", action="store_true", help="--show training samples")
    parser.add_argument("--list", action="store_true", help="list all stores of tokens")
    parser.add_argument("--delete", nargs="+", default=[], metavar="NAME", help="or `all`: erase")
    parser.add_argument("--data.store", dest="store", metavar="FOLDER", help="of all token stores")
    if {"--list", "--delete"} & {*argv}:
        return parser.parse_args(argv), []
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    return parse_known(parser, argv)


def _manage(options: argparse.Namespace) -> None:
    """Erase stores, list those that are left; raise ValueError for a name that no store has."""
    folder = stores.private_folder(options.store)
    names = stores.names(folder)
    asked = names if options.delete == ["all"] else options.delete
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f"--delete {unknown[0]}: no such store in {folder!r}; --list names them")
    for name in asked:
        stores.delete(os.path.join(folder, name))
        say(f"erased {os.path.join(folder, name)}", out=sys.stdout)
        warn("its runs are forgotten: no start and no release names them to add up any more")
    if not options.list:
        return
    names = stores.names(folder)
    for name in names:
        store = stores.load(place := os.path.join(folder, name))
        known = "unfinished, damaged, or of another version" if store is None else _described(store)
        size = sum(entry.stat().st_size for entry in os.scandir(place)) / 1e6
        say(f"{name}: {size:,.1f} MB: {known}", out=sys.stdout)
    say(f"{len(names)} stores in {folder}; --delete NAME erases one", out=sys.stdout)


def _described(store: stores.Store) -> str:
    """Describe what a store was made of. NOT PRIVATE."""
    written = time.localtime(os.stat(os.path.join(store.folder, "facts.json")).st_mtime)
    unit = store.facts["terms"]["unit_field"] or "record"
    runs = [run if os.path.isdir(run) else f"{run} (gone)" for run in stores.runs_of(store)]
    return (
        f"{len(store):,} records of {store.facts['path']}, by {unit}, with "
        f"{store.facts['tokenizer']}; written {time.strftime('%Y-%m-%d %H:%M', written)}; "
        f"runs: {', '.join(runs) or 'none'}"
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped; the next start begins anew", file=sys.stderr)
        sys.exit(130)
