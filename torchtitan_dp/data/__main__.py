"""Tokenize the records of a configuration; units, tokens, and what a sequence length cuts off.

    torchtitan-dp prepare MY.toml [--section.key value …] [--json FILE] [--plot FILE.png]
    torchtitan-dp prepare --list | --delete NAME … [--data.store FOLDER]

Everything that is printed depends on private records, and is labelled so: it is for their owner.
"""

import argparse
import os
import sys
from typing import Any

import numpy as np

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, load_config, parse_known, write_json
from torchtitan_dp.data import store as stores
from torchtitan_dp.data.console import say, warn
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.samples import Samples
from torchtitan_dp.preflight.check import build_samples, open_records

_QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)
_WORDS = {"0": "least", "50": "median", "100": "most"}
_LENGTHS = (0.25, 0.5, 1, 2, 4)  # of `training.seq_len`


def main(argv: list[str]) -> None:
    """Run the command."""
    options, overrides = _parse(argv)
    with exit_on_mistake():
        if options.list or options.delete:
            _manage(options)
            return
        config = load_config(overrides, 1)
        records = open_records(config)
        samples = build_samples(records, config)
        warnings = records.warnings + records.check_targets(samples)
        found = summarize(config, records, samples)
        if options.plot:
            _plot(found, options.plot)
    for warning in warnings:
        warn(warning)
    for line in lines(found, unit_word(config)):
        say(line)
    if options.json:
        write_json(options.json, found)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own options, and leave the configuration's command line."""
    parser = argparse.ArgumentParser(
        prog="torchtitan-dp prepare",
        description=(__doc__ or "").splitlines()[0],
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="list all stores of tokens")
    parser.add_argument("--delete", nargs="+", metavar="NAME", help="erase stores, or `all`")
    parser.add_argument("--data.store", dest="store", metavar="FOLDER", help="of the stores")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - is stdout")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the tokens that samples reach")
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    options, overrides = parse_known(parser, argv)
    if options.store is not None:
        overrides.append(f"--data.store={options.store}")
    return options, overrides


def _manage(options: argparse.Namespace) -> None:
    """List stores, or erase some.

    Raises:
        ValueError: one line; a name that no store has.
    """
    folder = stores.private_folder(options.store)
    names = stores.names(folder)
    asked = names if options.delete == ["all"] else options.delete or []
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f"--delete {unknown[0]}: no such store in {folder!r}; --list names them")
    for name in asked:
        stores.delete(os.path.join(folder, name))
        say(f"erased {os.path.join(folder, name)}")
    for name in names if options.list else ():
        store = stores.load(os.path.join(folder, name))
        if store is None:
            say(f"{name}: not whole, or damaged")
            continue
        size, facts = stores.size_of(store), store.facts
        say(f"{name}: {facts['records']:,} records of {facts['path']}, {size / 1e6:,.1f} MB")
    if options.list:
        say(f"{len(names)} stores in {folder}; --delete NAME erases one")


def summarize(config: JobConfig, records: Records, samples: Samples) -> dict[str, Any]:
    """Compute the figures of the report, of all units to train on. PRIVATE."""
    seq_len, tokens = config.training.seq_len, samples.lengths(records.train)
    total = max(int(tokens.sum()), 1)
    ladder = sorted({max(int(seq_len * factor), 1) for factor in _LENGTHS})
    whole = next((length for length in ladder if length >= tokens.max()), ladder[-1])
    lengths = [length for length in ladder if length <= max(whole, 2 * seq_len)]
    return {
        "not_private": True,
        "records": len(records.store),
        "units": len(records.store.units),
        "train_units": len(records.train),
        "heldout_units": len(records.heldout),
        "undecodable_records": records.undecodable(),
        "empty_units": int((~samples.learned(records.train)).sum()),
        "tokens": int(tokens.sum()),
        "tokens_quantiles": {str(q): int(np.percentile(tokens, q)) for q in _QUANTILES},
        "seq_len": seq_len,
        "by_length": [_at(length, tokens, samples, total) for length in lengths],
    }


def _at(length: int, tokens: np.ndarray, samples: Samples, total: int) -> dict[str, Any]:
    """Compute what samples of a length cut off, and the share of tokens that some draw reaches."""
    cut = np.minimum(tokens, length)
    return {
        "seq_len": length,
        "longer_units": float((tokens > length).mean()),
        "tokens_beyond": float((tokens - cut).sum() / total),
        "tokens_reached": 1.0 if samples.is_random else float(cut.sum() / total),
        "tokens_per_sample": float(cut.mean()),
    }


def lines(found: dict[str, Any], word: str) -> list[str]:
    """Describe the figures, a line each."""
    quantiles = found["tokens_quantiles"]
    described = [
        f"{found['records']:,} records in {found['units']:,} units: {found['train_units']:,} to "
        f"train on, {found['heldout_units']:,} held out",
        f"{found['tokens']:,} tokens to train on; tokens per {word}: "
        + ", ".join(f"{_WORDS.get(q, f'{q}%')} {value:,}" for q, value in quantiles.items()),
        f"{found['empty_units']:,} {word}s have no target and contribute nothing; "
        f"{found['undecodable_records']:,} records cannot be decoded",
    ]
    for row in found["by_length"]:
        mark = " (training.seq_len)" if row["seq_len"] == found["seq_len"] else ""
        described.append(
            f"in one sample of {row['seq_len']:,} tokens{mark}: {row['longer_units']:.0%} of "
            f"{word}s are longer, {row['tokens_beyond']:.0%} of tokens lie beyond, "
            f"{row['tokens_reached']:.0%} are in reach of some draw; "
            f"{row['tokens_per_sample']:,.0f} tokens per sample on average"
        )
    return described


def _plot(found: dict[str, Any], path: str) -> None:
    """Draw, by the length of a sample, the share of units that fit and of tokens in one sample.

    Raises:
        ValueError: one line; matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs the package matplotlib: pip install matplotlib") from None
    rows = found["by_length"]
    lengths = [row["seq_len"] for row in rows]
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for label, values in (
        ("tokens in one sample", [100 * (1 - row["tokens_beyond"]) for row in rows]),
        ("units that fit", [100 * (1 - row["longer_units"]) for row in rows]),
    ):
        axes.plot(lengths, values, marker="o", label=label)
    axes.axvline(found["seq_len"], color="grey", linestyle=":", label="training.seq_len")
    axes.set(xscale="log", xlabel="tokens of a sample", ylabel="% (not private)", ylim=(0, 103))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
