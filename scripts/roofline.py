"""Prints what the plan's roofline predicts: `plan --machine`, held against LongShield's figures.

    python scripts/roofline.py --paper | --lengths

`--paper` prints the throughputs of LongShield's table 5 (four H100, its authors' code, a sample on
all of them) beside the predicted ones, and the error; `--lengths` hours by length and GPUs, of 8B
with adapters on H100s in the fastest setting that fits.
"""

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarking.paper import CP, Task, paper_figures

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.choose import Choice, choose, digits
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.roofline import MACHINES, step_seconds

CONFIGS = Path(__file__).resolve().parents[1] / "train_configs"
UNITS = 10_000  # records that a step's are drawn from
LENGTHS = {
    65536: "llama3_8b_64k_lora",
    524288: "llama3_8b_512k_lora",
    1048576: "llama3_8b_1m_lora",
    4194304: "llama3_8b_4m_lora",
}


def beside_the_paper() -> tuple[list[list[str]], list[float]]:
    """Return the cells of each line, and the ratios of predicted to measured throughputs."""
    rows, ratios = [], []
    for (model, gpus, mbs, seq_len, arm), found in paper_figures("5").items():
        if (theirs := found["tokens/s"]) == "OOM":
            continue
        config = load_config(
            Task(model, arm, gpus, CP, mbs, seq_len).case().arguments(seq_len), gpus
        )
        seconds = step_seconds(config, shape(config), MACHINES["h100"], 1).microbatch
        rate = seq_len * mbs / seconds / gpus / 1000
        ratios.append(rate / float(theirs.removesuffix("k")))
        cells = [model, f"{seq_len:,}", arm, theirs, f"{rate:.2f}k", f"{ratios[-1]:.2f}"]
        rows.append(cells)
    return rows, ratios


def lengths() -> Iterator[list[str]]:
    """Yield the cells of 8B with adapters by length and GPUs."""
    machine = MACHINES["h100"]
    for seq_len, name in LENGTHS.items():
        for gpus in (8, 64, 512):
            toml = f"--job.config_file={CONFIGS / name}.toml"
            given = [toml, "--checkpoint.no-initial_load_in_hf", f"--training.seq_len={seq_len}"]
            training = load_config(given, gpus).training
            rate = training.global_batch_size / UNITS
            (best,) = choose(given, gpus, machine, machine.memory_gib, UNITS, rate, wanted=1)
            hours = digits(best.step.hours(training.steps))
            yield [f"{seq_len:,}", str(gpus), *cells_of(best), hours]


def cells_of(one: Choice) -> list[str]:
    """Return its mesh, what it recomputes, GiB, and the seconds of a step."""
    mesh = " x ".join(str(value) for key, value in one.keys.items() if key.endswith("_degree"))
    offloads = ", offloaded" * one.keys["activation_checkpoint.offload_inputs"]
    mode = one.keys["activation_checkpoint.mode"] + offloads
    return [mesh, mode, f"{one.peak_bytes / GIB:.1f}", digits(one.step.total)]


def show_table(head: list[str], rows: Iterable[list[str]]) -> None:
    for cells in ([head], [["---"] * len(head)], rows):
        for line in cells:  # each as it is there
            print(f"| {' | '.join(line)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--paper", action="store_true")
    which.add_argument("--lengths", action="store_true")
    if parser.parse_args().lengths:
        head = ["tokens", "GPUs", "replicate x shard x cp", "recomputed", "GiB"]
        show_table([*head, "s a step", "hours"], lengths())
        return
    rows, ratios = beside_the_paper()
    show_table(["model", "T", "arm", "LongShield, measured", "predicted", "ratio"], rows)
    error = statistics.mean(abs(math.log(ratio)) for ratio in ratios)
    print(
        f"\n{len(ratios)} lines: predicted over measured {min(ratios):.2f} to {max(ratios):.2f}, "
        f"median {statistics.median(ratios):.2f}, mean factor of error {math.exp(error):.2f}"
    )


if __name__ == "__main__":
    main()
