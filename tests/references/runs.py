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
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

from tests.accounts import mechanism
from tests.processes.runs import train, with_sigma, write_records
from tests.test_meshes import arguments, read_weights
from torchtitan_dp.privacy.accounting import compose, noise_for
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.segments import Mechanism, Segment

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
USUAL = ("poisson", 0.8, 0.01, 500)
# What `compose` is asked for: kind, noise, rate, steps, and projections, bands or a round's steps.
SETTINGS: dict[str, tuple[float, tuple[tuple[Any, ...], ...]]] = {
    "usual": (1e-5, (USUAL,)),
    "usual, 1e-8": (1e-8, (USUAL,)),
    "usual, 1e-12": (1e-12, (USUAL,)),
    "resumed": (1e-5, (("poisson", 0.8, 0.01, 200), ("poisson", 0.8, 0.01, 300))),
    "more noise after": (1e-6, (("poisson", 0.7, 0.02, 40), ("poisson", 1.1, 0.02, 400))),
    "all units at each step": (1e-5, (("poisson", 12.0, 1.0, 100),)),
    "of two runs": (
        1e-7,
        (("poisson", 0.9, 0.004, 700), ("poisson", 4.0, 1.0, 20), ("poisson", 0.6, 0.001, 64)),
    ),
    "many steps": (1.1e-10, (("poisson", 0.614, 4e-5, 100_000),)),
    "few steps": (1e-5, (("poisson", 0.4463, 0.0141, 30),)),
    "half of all units": (1e-4, (("poisson", 2.0, 0.5, 20),)),
    "estimated": (1e-5, (("estimated", 1.0, 0.01, 200, 32),)),
    "estimated, 1e-12": (1e-12, (("estimated", 1.0, 0.01, 200, 32),)),
    "estimated from 256": (1e-6, (("estimated", 0.8, 0.02, 100, 256),)),
    "estimated in part": (1e-5, (("estimated", 1.0, 0.01, 100, 32), ("poisson", 1.0, 0.01, 100))),
    "bands": (1e-5, (("bands", 0.8, 0.01, 400, 8),)),
    "bands, 1e-12": (1e-12, (("bands", 0.8, 0.01, 400, 8),)),
    "bands after steps": (1e-6, (USUAL, ("bands", 1.0, 0.01, 400, 4))),
    "a round": (1e-5, (("rounds", 0.6, 1 / 64, 64, 64),)),
    "rounds": (1e-6, (("rounds", 0.8, 1 / 20, 60, 20),)),
    "rounds, 1e-12": (1e-12, (("rounds", 0.8, 1 / 20, 60, 20),)),
    "rounds after steps": (1e-5, (USUAL, ("rounds", 0.8, 1 / 20, 40, 20))),
}
SPENDINGS = [f"{accountant} {name}" for name in SETTINGS for accountant in ("pld", "rdp")]
TARGETS = {"poisson": 8.0, "estimated": 2.0, "bands": 3.0, "rounds": 8.0}  # epsilon, of each sigma


def mechanism_of(kind: str, sigma: float, rate: float, *more: int) -> Mechanism:
    if kind == "bands":
        return Mechanism(sigma, rate, column=cut_off(more[0]))
    if kind == "rounds":
        return Mechanism(sigma, rate, round_steps=more[0])
    return mechanism(sigma, rate, *more)


def machine() -> str:
    """The CPU and the packages, as far as the last bit of a result depends on them: matrix products
    and FFTs choose kernels by the CPU's model, not by AVX-512 alone."""
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = "-".join(re.findall(r"(?:vendor_id|cpu family|model)\s+: (.*)", known)[:3])
    packages = {"torch": torch, "numpy": numpy, "scipy": scipy}
    versions = ", ".join(f"{n} {p.__version__.split('+')[0]}" for n, p in packages.items())
    return f"{platform.machine()}, {cpu or platform.processor()}, {versions}"


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
    accountant, _, name = case.partition(" ")
    delta, parts = SETTINGS[name]
    segments = [
        Segment(mechanism_of(kind, sigma, rate, *more), steps)
        for kind, sigma, rate, steps, *more in parts
    ]
    return repr(compose(segments, delta=delta, accountant=accountant))


def sigma_of(kind: str) -> str:
    """Return the noise for a target, to the last digit."""
    _, _, rate, steps, *more = {
        "poisson": USUAL,
        **{parts[0][0]: parts[0] for _, parts in SETTINGS.values() if parts[0][0] != "poisson"},
    }[kind]
    terms = {"target_epsilon": TARGETS[kind], "delta": 1e-6, "accountant": "pld"}
    return repr(noise_for(mechanism_of(kind, 1.0, rate, *more), steps, **terms))


@dataclasses.dataclass(frozen=True)
class Reference:
    """A file of references."""

    machine: str
    weights: dict[str, dict[str, str]]
    epsilons: dict[str, str]
    sigmas: dict[str, str]


def main(file: str, *cases: str) -> None:
    weights: dict[str, Any] = {}
    epsilons = {} if cases else {case: epsilon_of(case) for case in SPENDINGS}
    sigmas = {} if cases else {kind: sigma_of(kind) for kind in TARGETS}
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            weights[case] = weights_of(case, Path(folder))
        print(case, weights[case], flush=True)
        found = Reference(machine(), weights, epsilons, sigmas)
        Path(file).write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
