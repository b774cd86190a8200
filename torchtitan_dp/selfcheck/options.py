"""The command line of `python -m torchtitan_dp.selfcheck`."""

import argparse

from torchtitan_dp.config.load import fail


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse selfcheck's own options, and leave the configuration's command line, if any."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.selfcheck",
        description=description,
        epilog="With --config any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        "--job.config_file",
        dest="config",
        metavar="FILE",
        help="the TOML of a run: check what it would use (default: every gradient method)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is stdout")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="of the process group, for ranks that share a device: cpu:gloo,cuda:gloo",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.config is not None:
        return options, ["--job.config_file", options.config, *overrides]
    if overrides:
        fail(f"{overrides[0]}: without --config there is nothing to override; name a TOML")
    return options, []
