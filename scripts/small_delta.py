"""Print epsilon over delta, by this package, by dp-accounting's PLD and by RDP.

python scripts/small_delta.py       the table of docs/proofs.md
"""

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from torchtitan_dp.privacy import pld, rdp
from torchtitan_dp.privacy.segments import GaussianSteps

SETTINGS = [(4e-5, 0.614, 100_000), (1e-3, 0.6, 10_000), (0.0141, 0.4463, 30)]
DELTAS = [1e-5, 1e-12, 1e-15]

if __name__ == "__main__":
    print("| q, σ, steps | δ | ours | dp-accounting's PLD | RDP |\n| --- | --- | --- | --- | --- |")
    for q, sigma, steps in SETTINGS:
        theirs = PLDAccountant(value_discretization_interval=2e-4)
        theirs.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
        segments = (GaussianSteps(sigma, q, steps),)
        for delta in DELTAS:
            found = pld.pld_epsilon(segments, delta), theirs.get_epsilon(delta)
            numbers = [f"{value:.4f}" for value in (*found, rdp.rdp_epsilon(segments, delta))]
            print("|", " | ".join([f"{q:g}, {sigma:g}, {steps:,}", f"{delta:g}", *numbers]), "|")
