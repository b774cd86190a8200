"""One command for everything: `torchtitan-dp COMMAND …`, or `python -m torchtitan_dp COMMAND …`.

CONFIG is a TOML, or the name of a shipped one, such as llama3_debug. `COMMAND --help` has a
command's own options.
"""

import contextlib
import difflib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from torchtitan_dp.base.process import VERBOSE, forbid_core_dumps, processes_asked
from torchtitan_dp.config.commands import CONFIG_OPTION, help_of
from torchtitan_dp.config.load import exit_on_mistake, fail

_COMMANDS = {
    "train": "CONFIG [--section.key value …]: train on this machine",
    "plan": "CONFIG: epsilon, samples, noise, cost and memory of a run, before it",
    "tune": "CONFIG --epsilon E --try KEY=V,V …: compare settings by published losses",
    "prepare": "CONFIG (or `data`): tokenize the records once, count tokens; --show samples",
    "audit": "CONFIG: attack the mechanism or a run, for a lower bound on epsilon",
    "ledger": "RUN…: verify runs, and add up their privacy budgets",
    "release": "RUN FOLDER: write what may be published, with a model card",
    "report": "RUN: one HTML page on a run, or its --status",
    "selfcheck": "check gradients, sums and noise on this machine",
}
_FOLDER = Path(__file__).parent
_TAKE_CONFIG = ("train", "prepare", "plan", "audit", "tune")


@contextlib.contextmanager
def _until_the_reader_leaves() -> Iterator[None]:
    """End with code 1 and no traceback when stdout is closed early, as `head` does."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


@_until_the_reader_leaves()
def main(argv: list[str] | None = None) -> None:
    """Run a command in this process; SystemExit with its exit code."""
    forbid_core_dumps()  # most of them read records
    command, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return
    command = "prepare" if command == "data" else command
    if command not in _COMMANDS:
        close = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(_COMMANDS)}"
        fail(f"'{command}' is no command: {hint}")
    if command in _TAKE_CONFIG and rest and not rest[0].startswith("-"):
        rest[:1] = ["--job.config_file", str(config_path(rest[0]))]
    module = "data" if command == "prepare" else command
    if {"-h", "--help"} & {*rest} and command != "prepare":
        is_train, text = command == "train", _FOLDER / "train/help.txt"
        print(text.read_text("utf-8") if is_train else help_of(command, _COMMANDS[command]), end="")
        return
    if command == "train":
        if not any(option.startswith(CONFIG_OPTION) for option in rest):
            fail("CONFIG is missing: torchtitan-dp train CONFIG, the TOML of the run")
        module, rest = _training(rest)
    sys.argv = [f"torchtitan_dp.{module}", *rest]
    runpy.run_module(f"torchtitan_dp.{module}", run_name="__main__", alter_sys=True)


def usage() -> str:
    """Describe the commands and the shipped configurations."""
    width = max(map(len, _COMMANDS))
    commands = [f"  {name:{width}}  {words}" for name, words in _COMMANDS.items()]
    shown = ["usage: torchtitan-dp COMMAND …", "", *commands, ""]
    return "\n".join([*shown, f"shipped configurations: {', '.join(shipped())}"])


def config_path(name: str) -> Path:
    """Find a configuration by its path, or by a shipped one's name; if there is none, exit with
    code 2 after one line."""
    if (path := Path(name)).is_file():
        return path
    if path.is_dir():
        fail(f"'{name}' is a folder: name the TOML of the run")
    configs = shipped()
    if name.removesuffix(".toml") not in configs:
        close = difflib.get_close_matches(name.removesuffix(".toml"), configs, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists the shipped configurations"
        fail(f"'{name}': no such file; {hint}")
    return configs[name.removesuffix(".toml")]


def shipped() -> dict[str, Path]:
    """Find the shipped configurations, by name: in a checkout, those of its `train_configs/`."""
    folder = (_FOLDER / "train_configs").resolve()
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _training(rest: list[str]) -> tuple[str, list[str]]:
    """Return the launcher and its arguments, with a process for each CUDA device or NGPU ones."""
    with exit_on_mistake():
        processes = processes_asked()
    if "--verbose" in rest:
        rest = [option for option in rest if option != "--verbose"]
        os.environ[VERBOSE] = "1"
    # TorchTitan's own setting: less fragmentation of GPU memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Workers with another parent know that their launcher died.
    os.environ["TORCHTITAN_DP_LAUNCHER_PID"] = str(os.getpid())
    return "launch", [
        *("--processes", processes, "--rdzv_backend", "c10d", "--rdzv_endpoint=localhost:0"),
        "--local_addr=127.0.0.1",  # a host name need not resolve
        *("--local-ranks-filter", os.environ.get("LOG_RANK", "0"), "--role", "rank"),
        *("--tee", "3", "-m", "torchtitan_dp.train", *rest),
    ]


if __name__ == "__main__":
    main()
