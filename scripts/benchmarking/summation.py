"""What adding up and noising clipped gradients costs: fp32, secure noise, and the exact sum.

    python scripts/benchmarking/summation.py [--values N] [--threads 1,2] [--rounds R] [--device D]

Times one sample's scaled addition to the sum, and the noise of one step (for the exact sum with its
way back to fp32), on flat tensors of N values. The three arms take turns in every round, so that a
machine whose speed drifts treats them alike; the table has medians, and the range of the rounds.
"CPU" is processor time, of all threads: what other programs on the machine disturb least.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from torchtitan_dp.privacy.fixed_point import unit
from torchtitan_dp.privacy.summation import FixedPointSum, FloatSum, Summation

C = 1.0
Seconds = tuple[float, float]  # elapsed, and of all processors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--values", type=int, default=27_500_000)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    arms: dict[str, Summation] = {
        "fp32": FloatSum(),
        "`secure_noise`": FloatSum(secure_noise=True),
        "`secure_noise`, `exact_sum`": FixedPointSum(unit(C, options.values)),
    }
    print(
        f"{options.values:,} values, {options.device}, {platform.processor() or platform.machine()}"
        f", torch {torch.__version__}; ms: median of {options.rounds} rounds (least to most)\n"
    )
    columns = "threads", "arm", "bytes a value"
    columns += "a sample's addition", "its CPU", "a step's noise", "its CPU"
    print(f"| {' | '.join(columns)} |")
    print("|" + " --- |" * len(columns))
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        measured = _time_in_turns(arms, options.values, options.rounds, options.device)
        for name, (adding, noising) in measured.items():
            size = arms[name].dtype.itemsize
            times = [_spread(t) for work in (adding, noising) for t in zip(*work, strict=True)]
            print(f"| {threads} | {name} | {size} | {' | '.join(times)} |")


def _time_in_turns(
    arms: dict[str, Summation], values: int, rounds: int, device: str
) -> dict[str, tuple[list[Seconds], list[Seconds]]]:
    """Of one addition and of one step's noise, by arm and round, after one to warm up."""
    factor = torch.tensor(0.5, device=device)
    rejected = torch.tensor(False, device=device)
    source = torch.randn(1, values, device=device) * (C * values**-0.5)
    gradient = torch.empty_like(source)
    sums = {
        name: torch.zeros(1, values, dtype=arm.dtype, device=device) for name, arm in arms.items()
    }
    seconds: dict[str, tuple[list[Seconds], list[Seconds]]] = {name: ([], []) for name in arms}
    for round_ in range(rounds + 1):
        for name in arms if round_ % 2 == 0 else reversed(arms):
            arm, total = arms[name], sums[name]
            total.zero_()
            gradient.copy_(source)

            def add(arm: Summation = arm, total: torch.Tensor = total) -> None:
                arm.add_clipped_(total, gradient, factor, rejected)

            def noise(arm: Summation = arm, total: torch.Tensor = total) -> None:
                arm.add_noise_(total[0], std=C, key=bytes(32), name="w", start=0)

            for took, work in zip(seconds[name], (add, noise), strict=True):
                elapsed = _seconds(work, device)
                if round_ > 0:
                    took.append(elapsed)
    return seconds


def _seconds(work: Callable[[], None], device: str) -> Seconds:
    _wait(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    _wait(device)
    return time.perf_counter() - start, time.process_time() - start_cpu


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _spread(seconds: Sequence[float]) -> str:
    least, middle, most = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.0f} ({1e3 * least:.0f} to {1e3 * most:.0f})"


if __name__ == "__main__":
    main()
