"""Runs and settings whose results may not move: three noisy steps from one seed, and epsilons.

    python -m tests.references.runs FILE.json [CASE …]      with PYTHONPATH at the tree to look at

At commit 82bacc4 `tests.processes.runs` is `tests.launch`. Weights are compared as bits, so a file
is of one version of PyTorch and one kind of CPU; their projection on a fixed vector is there as
well, in six digits.
"""

import dataclasses
import hashlib
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

from tests.processes.runs import train, with_sigma, write_records
from tests.test_meshes import arguments, read_weights

MESHES = {"1": (1, 1), "cp2": (1, 2), "dp2_cp2": (2, 2)}  # dp_shard, cp
PAIRS = ("--training.local_batch_size=2",)
METHODS = {
    "microbatch": ("--privacy.gradient_method=microbatch",),
    "grad_sample": ("--privacy.gradient_method=grad_sample", *PAIRS),
    "grad_sample_whole": (
        "--privacy.gradient_method=grad_sample",
        "--privacy.no-shard_grad_samples",
        *PAIRS,
    ),
    "ghost": ("--privacy.gradient_method=ghost", *PAIRS),
    "ghost_two_passes": ("--privacy.gradient_method=ghost", "--privacy.ghost_passes=two", *PAIRS),
    "randomized": ("--privacy.gradient_method=randomized", *PAIRS),
    "randomized_accounted": (
        *("--privacy.gradient_method=randomized", "--privacy.underestimates=accounted"),
        *PAIRS,
    ),
}
JSONL = ("--training.dataset=jsonl",)
OPTIONS = {
    "lora": ("--lora.rank=4",),
    "lora_pairs": ("--lora.rank=4", *METHODS["grad_sample"]),
    "prompts": (*JSONL, "--data.text_field=text", "--data.prompt_field=prompt"),
    "windows": (
        *(*JSONL, "--data.unit_field=user", "--data.unit_sampling=random"),
        "--data.windows_per_draw=2",
    ),
    "concat": (
        *(*JSONL, "--data.unit_field=user", "--data.unit_sampling=concat"),
        "--data.long_records=head",
    ),
    "no_buckets": ("--data.no-length_buckets",),
    "per_layer": ("--privacy.clipping=per_layer",),
    "automatic": ("--privacy.clip_function=automatic",),
    "secure_noise": ("--privacy.secure_noise",),
    "average": ("--ema.enable", "--ema.decay=0.9"),
    "recomputed": ("--activation_checkpoint.mode=full", "--training.seq_len=64"),
}
CASES = {
    **{f"{name}, {mesh}": (options, mesh) for name, options in METHODS.items() for mesh in MESHES},
    **{f"{name}, {mesh}": (o, mesh) for name, o in OPTIONS.items() for mesh in ("1", "cp2")},
    "lora, dp2_cp2": (OPTIONS["lora"], "dp2_cp2"),
}
# What `compose` is asked for: noise, rate, steps and projections of each segment.
SPENDINGS: dict[str, tuple[str, float, list[tuple[float, float, int, int]]]] = {
    f"{accountant} {name}": (accountant, delta, segments)
    for name, delta, segments in (
        ("usual", 1e-5, [(0.8, 0.01, 500, 0)]),
        ("resumed", 1e-5, [(0.8, 0.01, 200, 0), (0.8, 0.01, 300, 0)]),
        ("more noise after", 1e-6, [(0.7, 0.02, 40, 0), (1.1, 0.02, 400, 0)]),
        ("all units at each step", 1e-5, [(12.0, 1.0, 100, 0)]),
        ("of two runs", 1e-7, [(0.9, 0.004, 700, 0), (4.0, 1.0, 20, 0), (0.6, 0.001, 64, 0)]),
        ("estimated", 1e-5, [(1.0, 0.01, 200, 32)]),
        ("estimated in part", 1e-5, [(1.0, 0.01, 100, 32), (1.0, 0.01, 100, 0)]),
    )
    for accountant in ("pld", "rdp")
}


def machine() -> str:
    """The machine and the packages, as far as the last bit of a result depends on them."""
    cpu = torch.backends.cpu.get_cpu_capability()
    packages = {"torch": torch, "numpy": numpy, "scipy": scipy}
    versions = ", ".join(f"{n} {p.__version__.split('+')[0]}" for n, p in packages.items())
    return f"{platform.machine()}, {cpu}, {versions}"


def write_lines(path: Path) -> Path:
    """Prompts and answers of six users, as lines of JSON."""
    lines = [
        {"user": f"u{i % 6}", "prompt": f"What is {i}? ", "text": f"{i} is {'very ' * (i % 5)}odd."}
        for i in range(24)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def weights_of(case: str, folder: Path) -> dict[str, str]:
    """Train a case; return a hash of its weights, and their projection on a fixed vector."""
    options, mesh = CASES[case]
    dp_shard, cp = MESHES[mesh]
    jsonl = options[: len(JSONL)] == JSONL
    data = write_lines(folder / "lines") if jsonl else write_records(folder / "data")
    command = arguments(
        folder / "out",
        data,
        *("--training.steps=3", "--training.global_batch_size=4", "--checkpoint.interval=3"),
        *with_sigma(0.5),
        "--privacy.debug_seed=1",
        f"--parallelism.data_parallel_shard_degree={dp_shard}",
        f"--parallelism.context_parallel_degree={cp}",
        *options,
    )
    if "--privacy.underestimates=accounted" in options:
        command.append("--privacy.accountant=pld")
    train(command, log=folder / "log", world_size=dp_shard * cp)
    weights = read_weights(folder / "out/checkpoint/step-3")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    # Noise is the most of a step, so that lengths are all alike: this is not.
    waves = [
        value.double().flatten() @ torch.arange(value.numel()).double().cos()
        for value in weights.values()
    ]
    return {"sha256": digest.hexdigest(), "projection": f"{sum(waves):.6g}"}


def epsilon_of(case: str) -> str:
    """Return an accountant's epsilon, to the last digit."""
    from tests.accounts import steps_of
    from torchtitan_dp.privacy.accounting import compose

    accountant, delta, segments = SPENDINGS[case]
    composed = compose([steps_of(*s) for s in segments], delta=delta, accountant=accountant)
    return repr(composed)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A file of references."""

    machine: str
    weights: dict[str, dict[str, str]]
    epsilons: dict[str, str]


def main(file: str, *cases: str) -> None:
    weights: dict[str, Any] = {}
    epsilons = {} if cases else {case: epsilon_of(case) for case in SPENDINGS}
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            weights[case] = weights_of(case, Path(folder))
        print(case, weights[case], flush=True)
        found = Reference(machine(), weights, epsilons)
        Path(file).write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
