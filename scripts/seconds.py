"""The seconds of a step, predicted and measured, on this machine.

    python scripts/seconds.py [--rounds R] [--only debug] [--json FILE]
    python scripts/seconds.py --sharing [--rounds R]
    python scripts/seconds.py --paper | --meshes [--only 8b] | --lengths

Each setting has processes of its own, as a run has. In each round they calibrate, then take steps,
so that a prediction is of the machine as it was in that round; reported are medians of rounds.
Every step has a draw of a fixed size, for timing only. `--sharing` takes steps of four processes in
turns, in which all share each sample, or one has it alone. The others measure nothing. `--paper`
predicts LongShield's lines (table 5, on four H100) beside its figures; `--meshes` what
`plan --choose` finds for each shipped configuration beside all ranks on each sample; `--lengths`
hours by length and GPUs.
"""

import argparse
import itertools
import json
import operator
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarking.arms import ARMS, Setting
from benchmarking.measure import make_setting
from benchmarking.paper import CP, Task, paper_figures
from benchmarking.processes import on_processes, show
from benchmarking.worker import Step, build, draws_of_fixed_size, seconds_of

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
import torch

from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.calibration import calibrate
from torchtitan_dp.plan.choose import Choice, Draws, choose, digits
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.machines import MACHINES, Machine
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.peaks import step_of
from torchtitan_dp.plan.seconds import predict_step, step_seconds
from torchtitan_dp.plan.work import Counting

CONFIG = Path(__file__).resolve().parents[1] / "train_configs" / "llama3_debug.toml"
UNITS = 10_000  # records that a step's are drawn from
LENGTHS = {
    65536: "llama3_8b_64k_lora",
    524288: "llama3_8b_512k_lora",
    1048576: "llama3_8b_1m_lora",
    4194304: "llama3_8b_4m_lora",
}
STEPS = {"debug": 4, "30M": 1}  # in a round
APART = 0.1  # two settings whose times differ by more have an order


class Case(NamedTuple):
    """One setting: processes, arm, model, T, MBS, microbatches a step."""

    processes: int
    arm: str
    flavor: str
    seq_len: int
    batch_size: int = 1
    microbatches: int = 4

    @property
    def setting(self) -> Setting:
        given = [f"--model.flavor={self.flavor}", f"--training.seq_len={self.seq_len}"]
        sizes = dict(local_batch_size=self.batch_size, microbatches=self.microbatches)
        return make_setting(str(CONFIG), given, self.processes, **sizes)


CASES = (
    Case(1, "microbatch", "debug", 512),
    Case(1, "microbatch", "debug", 2048),
    Case(1, "microbatch + AC", "debug", 1024),
    Case(1, "V2", "debug", 512, 4, 1),
    Case(1, "ghost", "debug", 512, 4, 1),
    Case(1, "microbatch", "30M", 1024, 1, 2),
    Case(1, "microbatch", "30M", 4096, 1, 1),
    Case(1, "V2", "30M", 512, 4, 1),
    Case(2, "microbatch", "debug", 512),
    Case(2, "microbatch + AC", "debug", 2048),
    Case(2, "V2", "debug", 1024, 4, 1),
    Case(2, "microbatch", "30M", 2048, 1, 2),
)


def measure(case: Case, folder: str, rounds: int) -> tuple[list[float], list[Machine]]:
    """On every rank: seconds of a step, by round, and the machine at each round."""
    from torchtitan_dp.distributed.devices import device_name

    device, step = torch.device("cpu"), build(ARMS[case.arm], case.setting, folder)
    found, machines, steps = [], [], STEPS[case.flavor]
    with draws_of_fixed_size(case.setting.records):
        for _ in range(rounds + 1):  # the first warms up
            machines.append(calibrate(device, device_name(device), 1.0))
            step()
            found.append(seconds_of(step, steps) / steps)
    return found[1:], machines[1:]


def row(case: Case, rounds: int) -> dict[str, Any]:
    """Measure and predict a case, in processes of its own, as a run's are."""
    times, machines = on_processes(case.processes, measure, case, rounds=rounds)[0]
    config = load_config(case.setting.arguments(ARMS[case.arm], "unused"), case.processes)
    counting, args = Counting(), shape(config)
    with fake_world(case.processes, like_cuda=False, repeated=counting.repeated):
        _, work = step_of(config, args, counting)
    of = work, config, args.n_layers + 2, case.microbatches
    steps = [step_seconds(*of, machine) for machine in machines]
    predicted = [step.total for step in steps]
    ratio = statistics.median(map(operator.truediv, predicted, times))
    show(f"{case}: {ratio:.2f}")
    return (
        case._asdict()
        | {"measured": statistics.median(times), "rounds": times}
        | {"predicted": statistics.median(predicted), "by_round": predicted}
        | {"ratio": ratio, "parts": steps[-1].parts}
    )


SHARED = ("debug", 256, 24), ("30M", 1024, 8)  # model, T, records a step


def measure_sharing(folder: str, rounds: int) -> list[list[str]]:
    """On each of four ranks: cells of each model, with all ranks on each sample and with one."""
    found = []
    for flavor, seq_len, records in SHARED:
        steps = list[Step]()
        for cp in (4, 1):
            keys = {"model.flavor": flavor, "training.seq_len": seq_len}
            keys |= {"parallelism.context_parallel_degree": cp}
            given = [f"--{key}={value}" for key, value in keys.items()]
            sizes = dict(local_batch_size=1, microbatches=records * cp // 4)
            setting = make_setting(str(CONFIG), given, 4, **sizes)
            steps.append(build(ARMS["microbatch"], setting, f"{folder}/{flavor}{cp}"))
        with draws_of_fixed_size(records):
            times = [[seconds_of(step, 1) for step in steps] for _ in range(rounds + 1)][1:]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        ratio = statistics.median(alone / shared for shared, alone in times)
        row = [flavor, f"{seq_len:,}", str(records)]
        found.append([*row, *(f"{median:.3g}" for median in medians), f"{ratio:.2f}"])
    return found


def order(found: list[dict[str, Any]]) -> float:
    """The share of pairs, of those whose measured times are apart, that are predicted in order."""
    right = [
        (one["measured"] > other["measured"]) == (one["predicted"] > other["predicted"])
        for one, other in itertools.combinations(found, 2)
        if abs(one["measured"] / other["measured"] - 1) > APART
    ]
    return sum(right) / max(len(right), 1)


def beside_the_paper() -> Iterator[list[str]]:
    """Cells of LongShield's lines: tokens a second and device by its code, measured, and by ours,
    predicted."""
    machine = MACHINES["h100"]
    figures = paper_figures("5")
    for (model, gpus, mbs, seq_len, arm), found in figures.items():
        theirs = found["tokens/s"]
        if arm.startswith("non-DP") or theirs == "OOM":
            continue
        cells = [model, f"{seq_len:,}", arm, theirs]
        for ours in (arm, arm.replace("V2", "microbatch")):
            case = Task(model, ours, gpus, CP, mbs, seq_len).case()
            config = load_config(case.arguments(seq_len), gpus)
            _, step = predict_step(config, shape(config), gpus, machine, 4)
            rate = seq_len * mbs / step.microbatch / gpus
            share = rate / 1000 / float(theirs.removesuffix("k"))
            cells += [f"{rate / 1000:.2f}k", f"{share:.2f}"]
        yield cells


def arguments(name: str, *overrides: str) -> list[str]:
    """The command line of a shipped configuration of a Llama."""
    toml = f"--job.config_file={CONFIG.parent / name}.toml"
    return [toml, "--checkpoint.no-initial_load_in_hf", *overrides]


def predicted(given: list[str], gpus: int, machine: str, *, as_given: bool = False) -> Choice:
    """Predict a command line as it is given, or the fastest setting of it."""
    draws = Draws(UNITS, load_config(given, gpus).training.global_batch_size / UNITS)
    of = MACHINES[machine], MACHINES[machine].memory_gib, draws
    return choose(given, gpus, *of, given=as_given)[0]


def cells_of(one: Choice) -> list[str]:
    """Its mesh, what it recomputes, and GiB."""
    mesh = " x ".join(str(value) for key, value in one.keys.items() if key.endswith("_degree"))
    kept = ", weights kept" * one.keys["parallelism.keep_weights_gathered"]
    offloads = ", offloaded" * one.keys["activation_checkpoint.offload_inputs"]
    mode = one.keys["activation_checkpoint.mode"]
    return [mesh, f"{mode}{offloads}{kept}", f"{one.peak_bytes / GIB:.1f}"]


def meshes(only: str) -> Iterator[list[str]]:
    """Cells of each shipped configuration of a Llama, on four GPUs or the fewest that fit."""
    for toml in sorted(CONFIG.parent.glob("llama3_*.toml")):
        for machine in ("h100", "h100-pcie") if only in toml.stem else ():
            gpus = 8 if "4m" in toml.stem else 4
            given = arguments(toml.stem)
            all_share = [*given, "--parallelism.context_parallel_degree=-1"]
            one = predicted(all_share, gpus, machine, as_given=True)
            best = predicted(given, gpus, machine)
            before, after = one.step.total, best.step.total
            yield [
                *(f"`{toml.stem}`", str(gpus), machine, f"{one.peak_bytes / GIB:.1f}"),
                *(digits(before), *cells_of(best), digits(after), f"{after / before:.2f}"),
            ]


def lengths() -> Iterator[list[str]]:
    """Cells of 8B by length, adapters or all weights, and GPUs: hours of 12,800 samples."""
    for seq_len, name in LENGTHS.items():
        for trained, rank in (("LoRA", 16), ("all weights", 0)):
            for gpus in (8, 64, 512):
                given = arguments(name, f"--training.seq_len={seq_len}", f"--lora.rank={rank}")
                row = [f"{seq_len:,}", trained, str(gpus)]
                try:
                    best = predicted(given, gpus, "h100")
                except ValueError as why:
                    show(f"{why}")
                    yield [*row, "none fits", *[""] * 4]
                    continue
                hours = best.step.hours(load_config(given, gpus).training.steps)
                yield [*row, *cells_of(best), digits(best.step.total), digits(hours)]


def show_table(head: list[str], rows: Iterable[list[str]]) -> None:
    for cells in itertools.chain([head, ["---"] * len(head)], rows):  # each as it is there
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the settings whose words have this part")
    parser.add_argument("--json", type=Path, metavar="FILE")
    for name in ("--sharing", "--paper", "--meshes", "--lengths"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    if options.sharing:
        head = [
            "model",
            "T",
            "records a step",
            "all share, s a step",
            "one alone, s a step",
            "ratio",
        ]
        show_table(head, on_processes(4, measure_sharing, rounds=options.rounds)[0])
        return
    if options.meshes:
        head = ["configuration", "GPUs", "machine", "all share: GiB", "s a step"]
        head += ["replicate x shard x cp", "recomputed", "GiB", "s a step", "ratio"]
        show_table(head, meshes(options.only))
        return
    if options.lengths:
        head = ["tokens", "trained", "GPUs", "replicate x shard x cp", "recomputed", "GiB"]
        show_table([*head, "s a step", "hours"], lengths())
        return
    if options.paper:
        head = ["model", "T", "method", "LongShield, measured", "predicted", "ratio"]
        show_table([*head, "`microbatch`, predicted", "ratio"], beside_the_paper())
        return
    found = [row(case, options.rounds) for case in CASES if options.only in str(case)]
    head = ["processes", "arm", "model", "T", "MBS", "measured, s", "predicted, s", "ratio"]
    show_table(
        head,
        (
            [str(row[name]) for name in Case._fields[:5]]
            + [f"{row[name]:.3g}" for name in ("measured", "predicted", "ratio")]
            for row in found
        ),
    )
    print(f"\npairs in order: {order(found):.0%}")
    if options.json:
        machine = f"{platform.machine()}, torch {torch.__version__}"
        content = {"machine": machine, "command": " ".join(sys.argv), "settings": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
