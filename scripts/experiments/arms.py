"""Which runs the experiment is made of: `groups()` lists them by what they are for."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "plain", "private", "noise"]

SAMPLES = 512  # units in all steps of a run together: the compute that all tuning runs have
RANK, ALPHA = 8, 16.0
SEEDS = (1, 2, 3)
EPSILONS = (8.0, 3.0, 1.0)
STEPS = 16
SPLITS = (64, 32, 16, 8, 4)  # steps
# The best of `RATES_TRIED` on one seed, by the group "rates".
RATES = {("plain", 0): 8e-3, ("plain", RANK): 8e-3, ("private", 0): 8e-3, ("private", RANK): 16e-3}
RATES_TRIED = {
    ("plain", 0): (4e-3, 8e-3, 16e-3),
    ("plain", RANK): (8e-3, 16e-3, 32e-3),
    ("private", 0): (2e-3, 4e-3, 8e-3, 16e-3),
    ("private", RANK): (8e-3, 16e-3, 32e-3),
}
BOUNDS_TRIED = (0.1, 0.3)
# By rank, bands and optimizer: the rates tried on one seed; the first, the best, has all seeds.
BANDS_TRIED = {
    (0, 1, "AdamW"): (12e-3, 8e-3),
    (0, 16, "AdamW"): (24e-3, 16e-3, 32e-3),
    (0, 1, "MomentumSGD"): (8e-3, 12e-3),
    (0, 16, "MomentumSGD"): (16e-3, 12e-3, 24e-3),
    (RANK, 1, "AdamW"): (16e-3, 24e-3),
    (RANK, 16, "AdamW"): (48e-3, 32e-3),
}
BANDS_BOUND = {0: 1.0, RANK: 0.3}  # C: of "bounds", the best
# Four times the computation, as more steps: bands, optimizer, learning rate.
LONGER = ((1, "AdamW", 8e-3), (16, "AdamW", 16e-3), (16, "MomentumSGD", 12e-3))


@dataclass(frozen=True)
class Arm:
    """Describes one run. `kind`: no tuning; TorchTitan's without privacy; private; or noise alone.

    Args:
        rank: of LoRA; 0 trains all weights.
        epsilon: of "private"; of "noise", that of the run whose noise it has.
        samples: units in all steps together (an expectation where units are drawn).
        windows: `data.windows_per_draw`, of windows anywhere in a record; 0: its beginning.
        ema: whether what is evaluated is the average of weights; the last ones are then, too.
        bands: of correlated noise; 1: independent noise.
    """

    kind: Kind
    rank: int = 0
    epsilon: float = 0.0
    lr: float = 0.0
    seed: int = 1
    steps: int = STEPS
    samples: int = SAMPLES
    max_grad_norm: float = 1.0
    windows: int = 0
    ema: bool = False
    bands: int = 1
    optimizer: str = "AdamW"

    @property
    def batch(self) -> int:
        return self.samples // self.steps

    @property
    def name(self) -> str:
        """Say all settings, so that a run with others has another name."""
        if self.kind == "none":
            return "none"
        spent = "" if self.kind == "plain" else f"{self.epsilon:g}-C{self.max_grad_norm:g}"
        more = f"-K{self.windows}" if self.windows else ""
        more += "-ema" if self.ema else ""
        more += f"-b{self.bands}" if self.bands > 1 else ""
        more += "" if self.optimizer == "AdamW" else f"-{self.optimizer}"
        return (
            f"{self.kind}{spent}-{self.trained}-{self.batch}x{self.steps}{more}"
            f"-lr{self.lr:g}-seed{self.seed}"
        )

    @property
    def trained(self) -> str:
        return f"lora{self.rank}" if self.rank else "full"


def plain(rank: int, seed: int = 1) -> Arm:
    """Return the run without privacy, at the rate that was chosen for it."""
    return Arm("plain", rank, lr=RATES["plain", rank], seed=seed)


def private(rank: int, epsilon: float = 8.0, seed: int = 1) -> Arm:
    """Return the private run, at the rate that was chosen for it."""
    return Arm("private", rank, epsilon, lr=RATES["private", rank], seed=seed)


def noise(rank: int, seed: int = 1) -> Arm:
    """Return the run that has the noise of `private(rank)`, and next to no gradient."""
    return dataclasses.replace(private(rank, seed=seed), kind="noise")


def split_over(arm: Arm, steps: int) -> Arm:
    """Return the arm with as many samples in other steps.

    AdamW's moves add up as a random walk where noise is large, so that the rate goes with
    1 / sqrt(steps): then all splits can go as far.
    """
    return dataclasses.replace(arm, steps=steps, lr=round(arm.lr * (arm.steps / steps) ** 0.5, 6))


def groups() -> dict[str, list[Arm]]:
    """List the runs, by what they are for; one may be in several groups. A run of "main" that
    takes another's noise comes after it."""
    ranks = (0, RANK)
    both = [(rank, seed) for seed in SEEDS for rank in ranks]
    return {
        "none": [Arm("none")],
        "rates": [
            Arm(kind, rank, 8.0 if kind == "private" else 0.0, lr=lr)  # type: ignore[arg-type]
            for (kind, rank), tried in RATES_TRIED.items()
            for lr in tried
        ],
        "main": [
            *(plain(rank, seed) for rank, seed in both),
            *(private(rank, epsilon, seed) for rank, seed in both for epsilon in EPSILONS),
            *(noise(rank) for rank in ranks),
        ],
        "splits": [
            split_over(private(rank, seed=seed), steps)
            for rank in ranks
            for steps in SPLITS
            for seed in SEEDS
        ],
        "bounds": [
            dataclasses.replace(private(rank, seed=seed), max_grad_norm=bound)
            for rank in ranks
            for bound in BOUNDS_TRIED
            for seed in SEEDS
        ],
        "windows": [
            dataclasses.replace(private(0, seed=seed), windows=k) for k in (1, 4) for seed in SEEDS
        ],
        "averages": [
            dataclasses.replace(split_over(private(0), steps), ema=True) for steps in (STEPS, 64)
        ],
        "bands": [
            dataclasses.replace(
                private(rank, seed=seed),
                bands=bands,
                optimizer=optimizer,
                lr=lr,
                max_grad_norm=BANDS_BOUND[rank],
            )
            for (rank, bands, optimizer), (best, *others) in BANDS_TRIED.items()
            for seed, lr in [(1, lr) for lr in others] + [(seed, best) for seed in SEEDS]
        ],
        "longer": [
            dataclasses.replace(plain(0), samples=4 * SAMPLES, steps=4 * STEPS),
            *(
                dataclasses.replace(
                    private(0),
                    samples=4 * SAMPLES,
                    steps=4 * STEPS,
                    bands=bands,
                    optimizer=optimizer,
                    lr=lr,
                )
                for bands, optimizer, lr in LONGER
            ),
        ],
    }


def of_bands() -> list[Arm]:
    """List the runs of the page's section on correlated noise, those it compares with included."""
    of = groups()
    compared = [arm for arm in of["main"] if arm.kind == "plain" and not arm.rank]
    return [*of["none"], *compared, *of["bands"], *of["longer"]]


def arms(wanted: list[str]) -> list[Arm]:
    """List runs once each: of groups, or whose names begin so; all, if nothing is named."""
    of = groups()
    every = list(dict.fromkeys(arm for group in of.values() for arm in group))
    if not wanted:
        return every
    named = {arm for name in wanted for arm in of.get(name, [])}
    return [arm for arm in every if arm in named or arm.name.startswith(tuple(wanted))]
