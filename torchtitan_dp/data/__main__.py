"""The records of a configuration: units, tokens per unit, and what a sequence length cuts off.

    python -m torchtitan_dp.data MY.toml [--section.key value …] [--units N] [--json FILE]

Everything that is printed depends on private records, and is labelled so: it is for their owner.
"""

import argparse
import sys
from typing import Any

import numpy as np

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, load_config, parse_known, write_json
from torchtitan_dp.data.console import Progress, say, warn
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.learnable import check_targets
from torchtitan_dp.data.samples.samples import SampleStore
from torchtitan_dp.data.samples.tokenizer import load_tokenizer
from torchtitan_dp.preflight.check import build_samples, open_records

MOST_TOKENS = 2**20
"""Tokens of a unit that are counted at most."""
_QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)
_WORDS = {"0": "least", "50": "median", "100": "most"}
_LENGTHS = (0.25, 0.5, 1, 2, 4)  # of `training.seq_len`


def main(argv: list[str]) -> None:
    """Run the command."""
    options, overrides = _parse(argv)
    with exit_on_mistake():
        config = load_config(overrides, 1)
        records, tokenizer = open_records(config), load_tokenizer(config.model.hf_assets_path)
        samples = build_samples(records, tokenizer, config)
        terms = records.facts, records.wanted, unit_word(config)
        check_targets(samples, records.train, *terms, counts=False)
        tokens, targets, undecodable = _count(config, records, samples, options.units)
    for warning in records.warnings:
        warn(warning)
    found = summarize(config, records, tokens, targets, undecodable)
    for line in lines(found, unit_word(config)):
        say(line)
    if options.json:
        write_json(options.json, found)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own options, and leave the configuration's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.data",
        description=(__doc__ or "").splitlines()[0],
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--units", type=int, default=1000, metavar="N", help="to count the tokens of, at random"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - is stdout")
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    return parse_known(parser, argv)


def _count(
    config: JobConfig, records: Records, samples: SampleStore, most: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Count tokens and targets of random training units, int64, and their undecodable records."""
    if most < 1:
        raise ValueError(f"--units = {most}: must be 1 or more")
    how = samples.tokenizer, MOST_TOKENS, records.units
    store = SampleStore(records.store, *how, reading=samples.reading)
    rng = np.random.default_rng(0)
    chosen = rng.permutation(records.train)[:most]
    progress = Progress("counting tokens", len(chosen), f"{unit_word(config)}s")
    found, undecodable = np.zeros((len(chosen), 2), dtype=np.int64), 0
    for row, unit in enumerate(chosen.tolist()):
        excerpt = store.excerpt(unit)
        found[row] = len(excerpt.ids), excerpt.learned
        undecodable += excerpt.undecodable
        progress.add(1)
    progress.end()
    return found[:, 0], found[:, 1], undecodable


def summarize(
    config: JobConfig, records: Records, tokens: np.ndarray, targets: np.ndarray, undecodable: int
) -> dict[str, Any]:
    """Compute the figures of the report. PRIVATE."""
    seq_len, total = config.training.seq_len, max(int(tokens.sum()), 1)
    ladder = sorted({max(int(seq_len * factor), 1) for factor in _LENGTHS})
    whole = next((length for length in ladder if length >= tokens.max()), ladder[-1])
    lengths = [length for length in ladder if length <= whole or length == seq_len]
    return {
        "not_private": True,
        "records": len(records.store),
        "units": len(records.units),
        "train_units": len(records.train),
        "heldout_units": len(records.heldout),
        "counted_units": len(tokens),
        "undecodable_records": undecodable,
        "empty_units": int((targets == 0).sum()),
        "target_share": float(targets.sum() / total),
        "tokens_quantiles": {str(q): int(np.percentile(tokens, q)) for q in _QUANTILES},
        "seq_len": seq_len,
        "by_length": [
            {
                "seq_len": length,
                "longer_units": float((tokens > length).mean()),
                "tokens_beyond": float(np.maximum(tokens - length, 0).sum() / total),
                "tokens_per_sample": float(np.minimum(tokens, length).mean()),
            }
            for length in lengths
        ],
    }


def lines(found: dict[str, Any], word: str) -> list[str]:
    """Describe the figures, a line each."""
    quantiles = found["tokens_quantiles"]
    described = [
        f"{found['records']:,} records in {found['units']:,} units: {found['train_units']:,} to "
        f"train on, {found['heldout_units']:,} held out",
        f"tokens per {word}, of {found['counted_units']:,} at random: "
        + ", ".join(f"{_WORDS.get(q, f'{q}%')} {value:,}" for q, value in quantiles.items())
        + (f" (counted up to {MOST_TOKENS:,})" if quantiles["100"] >= MOST_TOKENS else ""),
        f"targets: {found['target_share']:.0%} of these tokens",
        f"{found['empty_units']:,} of these {word}s have no target and contribute nothing; "
        f"{found['undecodable_records']:,} records cannot be decoded",
    ]
    for row in found["by_length"]:
        mark = " (training.seq_len)" if row["seq_len"] == found["seq_len"] else ""
        described.append(
            f"in one sample of {row['seq_len']:,} tokens{mark}: {row['longer_units']:.0%} of "
            f"{word}s are longer, {row['tokens_beyond']:.0%} of tokens lie beyond; "
            f"{row['tokens_per_sample']:,.0f} tokens per sample on average"
        )
    return described


if __name__ == "__main__":
    main(sys.argv[1:])
