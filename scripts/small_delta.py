"""Print epsilon over delta, by this package, by dp-accounting's PLD and by RDP, with seconds.

python scripts/small_delta.py       the table of docs/proofs.md; about five minutes
"""

import time
from collections.abc import Callable

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from torchtitan_dp.privacy import pld, rdp
from torchtitan_dp.privacy.segments import GaussianSteps

SETTINGS = [(4e-5, 0.614, 100_000), (1e-3, 0.6, 10_000), (0.0141, 0.4463, 30)]
DELTAS = [1e-5, 1e-7, 1e-9, 1.1e-10, 1e-12, 1e-15]


def dp_accounting(q: float, sigma: float, steps: int, delta: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=2e-4)
    accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
    return accountant.get_epsilon(delta)


def timed(function: Callable[..., float], *arguments: object) -> str:
    begun = time.process_time()
    found = function(*arguments)
    return f"{found:.4f} ({time.process_time() - begun:.1f} s)"


def main() -> None:
    print("| q, σ, steps | δ | ours | dp-accounting's PLD | RDP |\n| --- | --- | --- | --- | --- |")
    for q, sigma, steps in SETTINGS:
        for delta in DELTAS:
            segments = (GaussianSteps(sigma, q, steps),)
            ours = timed(pld.pld_epsilon, segments, delta)
            theirs = timed(dp_accounting, q, sigma, steps, delta)
            loose = timed(rdp.rdp_epsilon, segments, delta)
            row = f"{q:g}, {sigma:g}, {steps:,} | {delta:g} | {ours} | {theirs} | {loose}"
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
