"""The command lines of the commands, parsed and judged before PyTorch is imported.

Each `__main__` calls `first` above its imports of PyTorch, which take seconds: help, a wrong option
wrong keys and values of the configuration, and paths that are not there need none of them.
"""

import difflib
import gc
import os
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from typing import Any, NoReturn

from torchtitan_dp.config.load import check_paths, exit_on_mistake, fail, load_config

CONFIG_OPTION = ("--job.config_file", "--job.config-file")
_ALL_KEYS = "Any --section.key value of the configuration is taken too."

_Option = tuple[tuple[str, ...], dict[str, Any]]


def _takes(name: str, metavar: str, text: str, kind: Any = str, **terms: Any) -> _Option:
    return tuple(name.split()), {"type": kind, "metavar": metavar, "help": text, **terms}


def _flag(name: str, text: str, action: Any = "store_true") -> _Option:
    return (name,), {"action": action, "help": text}


_WITH = "another run on these records, as of a search: the card adds its epsilon; repeat it"
_JSON = _takes("--json", "FILE", "write the result there; - is stdout")
_OPTIONS: dict[str, tuple[_Option, ...]] = {
    "plan": (
        _takes("--world_size --gpus", "N", "processes; default: NGPU, else 1", int),
        _takes("--ranks_here", "R", "ranks on this host: exit with 2 if they lack memory", int),
        _takes("--units", "N", "assume N units; read no records", int),
        _takes("--memory_gib", "G", "of a GPU: exit with 2 if the run exceeds it", float),
        _JSON,
        _takes("--machine", "M", "a100, h100, h200 or b200: predict the time by a roofline"),
        _flag("--choose", "compare meshes, checkpointing and methods, the fastest first"),
        _flag("--recommend", "list batches and steps by their noise at equal compute"),
        _flag("--no_memory", "predict no memory for --json, which takes a minute"),
    ),
    "tune": (
        _takes("--epsilon", "E", "of all trials together", float, required=True),
        _takes(
            "--try",
            "KEY=V,V",
            "values of a key, or of keys that change together: KEY/KEY=V/V,V/V; repeat it",
            dest="tries",
            action="append",
            required=True,
        ),
        _flag("--plan", "print what it will spend; run nothing"),
        _JSON,
    ),
    "audit": (
        _takes(
            "--instrument",
            "game|text",
            "game: steps of a tiny model, with a unit and without (default); text: one run of the "
            "configured model, and an attack on its export",
            choices=("game", "text"),
            default="game",
        ),
        _takes("--trials", "N", "game: steps with and without a unit (2000)", int, default=2000),
        _takes("--canaries", "N", "text: how many (1000)", int, default=1000),
        _JSON,
    ),
    "ledger": (
        _takes("runs", "RUN", "the job.dump_folder of a run", nargs="+"),
        _takes("--delta", "DELTA", "of the total; default: the runs' smallest", float),
        _flag("--overlapping", "add up runs on different records too: for a unit in all of them"),
        _JSON,
    ),
    "report": (
        _takes("run", "RUN", "the job.dump_folder of a run"),
        _takes("--output", "FILE.html", "default: RUN/report.html", os.path.expanduser),
        _flag("--status", "print step, epsilon, time left and last checkpoint, and write no page"),
    ),
    "release": (
        _takes("run", "RUN", "the job.dump_folder of a private run"),
        _takes("out", "OUT", "a folder that does not exist yet"),
        _flag(
            "--stop_not_from_results",
            "state, in the card too, that neither results nor a clock (a time limit, a preemption) "
            "made a run stop early: epsilon then counts only the steps taken",
        ),
        _flag(
            "--lost_steps_not_seen",
            "state, in the card too, that nobody saw anything of the steps that crashes lost (no "
            "checkpoint, no log): epsilon leaves them out",
        ),
        _flag("--merged", "of a run with [lora]: a whole model, with the adapters merged"),
        _flag(
            "--ema",
            "of a run with [ema]: the average of weights (the default), or those of the last step",
            BooleanOptionalAction,
        ),
        _takes("--with", "RUN", _WITH, dest="others", action="append", default=[]),
        _takes("--base_model", "NAME", "the base's public name, for the card (not checked)"),
    ),
    "selfcheck": (
        _takes(
            f"--config {' '.join(CONFIG_OPTION)}",
            "FILE",
            "the TOML of a run: check what it would use (default: every gradient method)",
            dest="config_file",
        ),
        _JSON,
        _takes("--backend", "NAME", "of the process group, for ranks that share a device"),
    ),
}
_OF_NO_CONFIG = ("ledger", "report", "release")


def parser_of(command: str, doc: str | None) -> ArgumentParser:
    """Return the parser of a command, described by the first line of its module's `doc`."""
    epilog = None if command in _OF_NO_CONFIG else _ALL_KEYS
    parser = tool_parser(f"torchtitan-dp {command}", doc, epilog)
    for names, terms in _OPTIONS[command]:
        parser.add_argument(*names, **terms)
    return parser


def help_of(command: str, words: str) -> str:
    """Return the help of a command that is described by `words`."""
    parser = parser_of(command, words.split(": ")[-1].capitalize())
    if command not in (*_OF_NO_CONFIG, "selfcheck"):
        parser.prog += " CONFIG"
    return parser.format_help()


def tool_parser(prog: str, doc: str | None, epilog: str | None = _ALL_KEYS) -> ArgumentParser:
    """Return the parser of a tool, described by the first line of its module's `doc`."""
    first, *_ = (doc or "").splitlines()
    return _Parser(prog, description=first, epilog=epilog, allow_abbrev=False)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message}; {self.prog} --help lists all")


def parsed(command: str, doc: str | None, argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return a command's own options, and the configuration's command line for `load_config`."""
    gc.enable()
    parser = parser_of(command, doc)
    needs_config = command not in (*_OF_NO_CONFIG, "selfcheck")
    parse = parse_known if needs_config else ArgumentParser.parse_known_args
    options, overrides = parse(parser, argv)
    names = [name for of, _ in _OPTIONS[command] for name in of]
    for name in (word.partition("=")[0] for word in overrides):
        if name.startswith("--") and "." not in name:  # no key of the configuration
            longer = [one for one in names if one.startswith(name)]
            for close in longer or difflib.get_close_matches(name, names, n=1):
                fail(f"{name}: no such option; did you mean {close}?")
    if overrides and command in _OF_NO_CONFIG:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if command != "selfcheck":
        return options, overrides
    if overrides and options.config_file is None:
        fail(f"{overrides[0]}: without --config there is nothing to override; name a TOML")
    config = [] if options.config_file is None else [CONFIG_OPTION[0], options.config_file]
    return options, [*config, *overrides]


def parse_known(parser: ArgumentParser, argv: list[str]) -> tuple[Namespace, list[str]]:
    """Return a tool's own options, and the configuration's command line for `load_config`."""
    parser.add_argument(*CONFIG_OPTION, dest="config_file", metavar="FILE", help="the TOML")
    known, overrides = parser.parse_known_args(argv)
    if known.config_file is None:
        fail("--job.config_file is missing: name the TOML of the run")
    return known, [CONFIG_OPTION[0], known.config_file, *overrides]


def first(command: str, doc: str | None) -> None:
    """Answer this process's `--help`, wrong options, or wrong keys and values of its configuration,
    and exit; else return, without collection of garbage until `parsed` is called again."""
    options, overrides = parsed(command, doc, sys.argv[1:])
    if overrides:
        with exit_on_mistake():
            config = load_config(overrides, None)
            if command != "selfcheck" and not getattr(options, "units", None):
                check_paths(config)
    gc.disable()  # a fifth of the seconds in which PyTorch and transformers are imported
