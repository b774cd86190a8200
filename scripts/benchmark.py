"""Training with privacy against plain TorchTitan: the same records, processes, model, optimizer.

    python scripts/benchmark.py [--config FILE] [--devices N] [--arms a,b] [--batch_sizes 1,4]
        [--rounds R] [--steps S] [--microbatches M] [--json FILE]
        [--table arms|counts|2|3|4|5] [--section.key value …]
    python scripts/benchmark.py --show FILE.json

Arms: TorchTitan without privacy on our modules (`non-DP`), so that a gap is the price of privacy;
`microbatch`, LongShield's `V1` (per-sample gradients, whole on each rank) and `V2` (sharded), each
also with full activation checkpointing (`+ AC`; V2 + AC is the paper's V3), and on one process
Opacus itself (`Opacus hooks`, `Opacus ghost`). Arms `+ LoRA` train adapters of rank 8, and are held
against plain TorchTitan that does (`non-DP + LoRA`). `TorchTitan's modules` is `non-DP` with
PyTorch's norms, whole logits, and weights that each block gathers and frees.

Time: all arms live in the same processes and take turns, so that a machine whose speed drifts
treats them alike; medians of the rounds, and medians of the rounds' ratios. Every step of every
arm has exactly M microbatches: a private arm's Poisson draws are replaced, in these processes, by
draws of that fixed size. For timing only; norms, clipping and noise are real. Memory and bytes:
each arm alone in fresh processes; on CPU the process's resident set (with freed memory given back
at once), on CUDA its tensors. The paper's tables (2 to 5, by number) are those of
benchmarking/paper.py.

What `--json` names is written anew after each arm. A run that was cut off goes on where it was, by
the same command: what it had measured lies in `<--json>.partial` until the end. `--show` prints the
tables of such a file, and runs nothing.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarking import arms as catalogue
from benchmarking import counts, paper, results
from benchmarking.measure import Measured, Repetitions, make_setting, measure, read_config
from benchmarking.processes import Journal, show

from torchtitan_dp.config.load import exit_on_mistake, fail

ROOT = Path(__file__).resolve().parent.parent
SET_HERE = {
    "training.local_batch_size": "--batch_sizes",
    "training.global_batch_size": "--microbatches",
    "privacy.gradient_method": "--arms",
    "activation_checkpoint.mode": "--arms",
}


def main() -> None:
    options, overrides = _parse()
    if options.show:
        print(_markdown(json.loads(options.show.read_text(encoding="utf-8"))))
        return
    with exit_on_mistake():
        _check(options, overrides)
        journal = Journal(_partial(options))
        if journal.resumed:
            show(f"{journal.resumed} measurements of {journal.path} are not repeated")
        for result in _results(options, overrides, journal):
            _write(options, result)
    print(_markdown(result))
    journal.remove()


def _partial(options: argparse.Namespace) -> Path | None:
    """Where measurements lie until the end; of the paper's tables, which share a result, apart."""
    if options.json is None:
        return None
    table = f".{options.table}" if options.table in paper.TABLES else ""
    return Path(f"{options.json}{table}.partial")


def _results(
    options: argparse.Namespace, overrides: list[str], journal: Journal
) -> Iterator[dict[str, Any]]:
    """What was found so far, and in the end all of it."""
    if options.table == "counts":
        yield _count(options)
    elif options.table in paper.TABLES:
        for stored in paper.run(options, overrides, journal):
            yield {"paper_tables": stored}
    else:
        yield from _run(options, overrides, journal)


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write what is there so far."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="default: train_configs/llama3_debug.toml")
    parser.add_argument(
        "--devices",
        type=int,
        help="processes; default: the CUDA devices, else 2, and one more table on 1",
    )
    parser.add_argument("--arms", help=f"from: {', '.join(catalogue.ARMS)}; default: all")
    parser.add_argument(
        "--batch_sizes", help="MBS, one row each; default: the configuration's, or 1,4 without one"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each arm")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a turn")
    parser.add_argument("--warm_up", type=int, default=1, help="steps of each arm before")
    parser.add_argument(
        "--microbatches", type=int, help="in a step; default: 4 at MBS 1 and 2 at any other"
    )
    tables = ("arms", "counts", *paper.TABLES)
    parser.add_argument("--table", choices=tables, default="arms")
    parser.add_argument(
        "--parts",
        default="predicted",
        help="of the paper's tables: predicted (default), measured (on 4 devices), or both",
    )
    parser.add_argument(
        "--models", default=",".join(counts.MODELS), help="of --table counts and the paper's"
    )
    parser.add_argument(
        "--seq_lens", default=",".join(map(str, counts.SEQ_LENS)), help="of --table counts"
    )
    for name in ("--json", "--show"):
        parser.add_argument(name, type=Path, metavar="FILE")
    options, overrides = parser.parse_known_args()
    options.is_default = options.config is None
    options.config = options.config or str(ROOT / "train_configs/llama3_debug.toml")
    options.root, options.machine = ROOT, _machine
    return options, overrides


def _check(options: argparse.Namespace, overrides: list[str]) -> None:
    """Refuse now what would fail after minutes of measuring, or be overridden unseen."""
    for name in ("rounds", "steps", "warm_up", "microbatches", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            fail(f"--{name} {value}: must be at least 1")
    if (options.warm_up + options.rounds * options.steps) > 900:
        fail("--rounds times --steps: at most 900 steps")
    if options.table == "counts" and not options.is_default:
        fail("--config: --table counts has its own; use --models")
    if options.table == "counts" and overrides:
        fail(f"{overrides[0]}: --table counts takes no configuration keys")
    for key, instead in SET_HERE.items():
        if any(override.partition("=")[0] == f"--{key}" for override in overrides):
            fail(f"--{key}: set here for every arm; use {instead}")
    if options.json is not None and not options.json.parent.is_dir():
        fail(f"{options.json}: no such folder")


def _run(
    options: argparse.Namespace, overrides: list[str], journal: Journal
) -> Iterator[dict[str, Any]]:
    """Measure the table that was asked for; yields the result so far, and in the end all of it.

    Raises:
        ValueError: the user's mistake, before anything is measured.
    """
    devices = options.devices or torch.cuda.device_count() or 2
    chosen = {devices: catalogue.choose(options.arms, devices)}
    if options.is_default and options.devices is None and options.arms is None and devices > 1:
        chosen[1] = catalogue.choose(",".join(catalogue.ON_ONE_PROCESS), 1)
    sizes = [read_config(options.config, overrides, devices).training.local_batch_size]
    if options.batch_sizes or options.is_default:
        sizes = numbers("--batch_sizes", options.batch_sizes or "1,4")
    settings = [
        make_setting(
            options.config,
            overrides,
            n,
            local_batch_size=mbs,
            microbatches=options.microbatches or (4 if mbs == 1 else 2),
        )
        for n in chosen
        for mbs in (sizes if n == devices else sizes[:1])
    ]
    found: list[Measured] = []
    how_often = Repetitions(options.rounds, options.steps, options.warm_up)
    for setting in settings:
        arms = chosen[setting.devices]
        found.append(Measured(setting, arms))
        for found[-1] in measure(arms, setting, how_often, journal):
            yield _result(options, found, devices)
    yield _result(options, found, devices)


def _result(options: argparse.Namespace, found: list[Measured], devices: int) -> dict[str, Any]:
    skipped = {(arm, m.setting.devices): why for m in found for arm, why in m.skipped.items()}
    return {
        "machine": _machine(devices),
        "command": " ".join(["scripts/benchmark.py", *sys.argv[1:]]),
        "draws": "draws of a fixed size, for timing only",
        "rounds": options.rounds,
        "steps_per_round": options.steps,
        "arms": [row for one in found for row in results.arm_rows(one)],
        "skipped": [
            {"name": arm, "world_size": n, "reason": reason} for (arm, n), reason in skipped.items()
        ],
    }


def numbers(option: str, given: str) -> list[int]:
    """Read numbers from 1, comma-separated.

    Raises:
        ValueError: one line for the user.
    """
    found = given.split(",")
    if not all(number.isdigit() and int(number) for number in found):
        raise ValueError(f"{option} {given}: numbers from 1, comma-separated")
    return [int(number) for number in found]


def _count(options: argparse.Namespace) -> dict[str, Any]:
    sizes, devices = options.batch_sizes or "1,4", options.devices or 4
    seq_lens = numbers("--seq_lens", options.seq_lens)
    rows = counts.count_rows(
        options.models.split(","), seq_lens, numbers("--batch_sizes", sizes), devices
    )
    command = " ".join(["scripts/benchmark.py", *sys.argv[1:]])
    return {"command": command, "torch": torch.__version__, "counts": rows}


def _machine(devices: int) -> str:
    if torch.cuda.is_available():
        return f"{devices} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"CPU, {os.cpu_count()} cores, {platform.machine()}, {devices} gloo processes, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _markdown(result: dict[str, Any]) -> str:
    if "paper_tables" in result:
        return paper.page(result["paper_tables"])
    machine = result.get("machine", f"torch {result.get('torch')}")
    parts = [f"{machine}. `{result['command']}`"]
    if "rounds" in result:
        parts.append(
            f"Medians of {result['rounds']} rounds; a gap is non-DP's throughput over the arm's, "
            "or the arm's memory over non-DP's, both with or both without AC, or LoRA. Private "
            f"arms have {result['draws']}."
        )
    parts += [results.table(kind, result[kind]) for kind in results.COLUMNS if result.get(kind)]
    parts += [
        f"Skipped on {one['world_size']}: {one['name']}: {one['reason']}"
        for one in result.get("skipped", [])
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
