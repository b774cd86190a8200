"""Tokenize the records of a configuration; units, tokens, and what a sequence length cuts off.

    torchtitan-dp prepare MY.toml [--section.key value …] [--json FILE]

Everything that is printed depends on private records, and is labelled so: it is for their owner.
"""

import os
import sys

from torchtitan_dp.config.commands import parse_known, tool_parser
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.config.load import exit_on_mistake, load_config, write_json
from torchtitan_dp.data import say, warn


def main(argv: list[str]) -> None:
    """Prepare the records of a configuration."""
    os.umask(0o077)  # its files have figures that are not private
    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    parser = tool_parser("torchtitan-dp prepare", __doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - is stdout")
    with exit_on_mistake():
        options, overrides = parse_known(parser, argv)
        config = load_config(overrides, 1)
        # PyTorch, which takes seconds to import: after all that needs none.
        from torchtitan_dp.data.dataset import describe
        from torchtitan_dp.preflight.check import build_samples, open_records

        records = open_records(config)
        samples = build_samples(records, config)
        warnings = records.warnings + records.check_targets(samples)
        found = records.figures(samples)
        if options.json:
            try:
                write_json(options.json, found)
            except OSError as error:
                raise ValueError(f"--json {options.json}: {error.strerror}") from error
    for warning in warnings:
        warn(warning)
    for line in describe(found, unit_word(config)):
        say(line)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nCtrl-C: stopped; the next start begins anew", file=sys.stderr)
        sys.exit(130)
