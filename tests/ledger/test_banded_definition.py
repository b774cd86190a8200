"""Whole histories of folders under correlated noise, against what the definition says they spend.

`definition` is written from docs/privacy.md alone, without the package: which steps were begun with
which noise, and the matrix. The folders' plans and ledgers are the trainer's own: stops, crashes,
older checkpoints, copies of folders, and runs from others' exports. No account may count less
than the definition, at any order.
"""

import copy
import dataclasses
import functools
import math
import random
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests import build
from tests.accounts import export, opened, write
from torchtitan_dp.checkpoint.plan import earlier_ledger, losable, settle
from torchtitan_dp.checkpoint.start import fresh, resumed, rewound
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import Lineage, RunLog, read_published
from torchtitan_dp.ledger.lineage import of_weights
from torchtitan_dp.ledger.spending import Run, total
from torchtitan_dp.ledger.spending import spent as spent_by
from torchtitan_dp.privacy.rdp import rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps, composition

UNITS, STEPS = 40, 16
ORDERS = (2, 5, 16)

# --- the definition -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Chain:
    """The steps of one start, by their numbers, and the terms of its noise."""

    run: str  # whose groups of units
    bands: int
    sigma: float
    rate: float  # q
    steps: list[int] = dataclasses.field(default_factory=list)


Seen = dict[Chain, int]  # how many of a chain's steps an attacker sees something of


def both(seen: Iterable[Seen]) -> Seen:
    """The union: of each chain, as much as any of them has."""
    found: Seen = {}
    for one in seen:
        for chain, steps in one.items():
            found[chain] = max(found.get(chain, 0), steps)
    return found


@functools.cache
def divergence(order: int, sigma: float, rate: float) -> float:
    """The Renyi divergence of a step of the Poisson-subsampled Gaussian, of integer order (Mironov,
    Talwar and Zhang 2019, section 3.3)."""
    terms = (
        math.comb(order, k)
        * (1 - rate) ** (order - k)
        * rate**k
        * math.exp((k * k - k) / (2 * sigma**2))
        for k in range(order + 1)
    )
    return math.log(math.fsum(terms)) / (order - 1)


def draws(chain: Chain, steps: int, group: int) -> int:
    """The Gaussian mechanisms of multiplier sigma by which a chain's first steps show a unit."""
    numbers, b = chain.steps[:steps], chain.bands
    column = [math.comb(2 * k, k) / 4**k for k in range(b)]
    matrix = sum(np.diag([c] * (steps - k), -k) for k, c in enumerate(column) if k < steps)
    moved = matrix[:, [i for i, number in enumerate(numbers) if number % b == group]]
    gram = moved.T @ moved  # of what the draws change in C x
    assert np.allclose(gram, np.diag(np.diag(gram))), "a unit twice within a band"
    assert (np.diag(gram) <= math.fsum(c * c for c in column) + 1e-12).all()
    return len(gram)


def definition(seen: Seen) -> dict[str, list[list[tuple[float, float, int]]]]:
    """By run and group: sigma, rate and number of the mechanisms that a unit of it is in."""
    found = {}
    for run in {chain.run for chain in seen}:
        of_run = [(chain, steps) for chain, steps in seen.items() if chain.run == run and steps]
        (b,) = {chain.bands for chain, _ in of_run} or {1}
        found[run] = [
            [(c.sigma, b * c.rate, draws(c, steps, group)) for c, steps in of_run]
            for group in range(b)
        ]
    return found


def spent(parts: Iterable[tuple[float, float, int]], order: int) -> float:
    return math.fsum(steps * divergence(order, sigma, rate) for sigma, rate, steps in parts)


def check(segments, seen: Seen) -> None:
    """Compare with a ledger's steps, for the worst unit, which is of any group in each run."""
    stated = [(p.noise_multiplier, p.sample_rate, p.steps) for p in composition(segments)]
    for order in ORDERS:
        groups = definition(seen).values()
        truth = math.fsum(max(spent(parts, order) for parts in of_run) for of_run in groups)
        assert spent(stated, order) >= truth * (1 - 1e-9)


def epsilon(seen: Seen) -> float:
    """What is spent on a unit of the groups that are worst at one order: never more than it all."""
    counts: dict[tuple[float, float], int] = defaultdict(int)
    for of_run in definition(seen).values():
        for sigma, rate, steps in max(of_run, key=functools.partial(spent, order=ORDERS[1])):
            counts[sigma, rate] += steps
    parts = [GaussianSteps(sigma, rate, n) for (sigma, rate), n in counts.items() if n]
    return rdp_epsilon(parts, 1e-5) if parts else 0.0


# --- folders --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Saved:
    """A checkpoint."""

    ledger: str
    seen: Seen  # by its weights


@functools.cache
def checked() -> JobConfig:
    """A configuration as it is loaded, which takes a second."""
    banded = "--privacy.noise=banded", "--privacy.bands=2", "--privacy.accountant=rdp"
    return build.config(*banded, f"--training.steps={STEPS}")


class Folder:
    """A run's folder, and what was really done in it."""

    def __init__(
        self,
        place: Path,
        bands: int,
        interval: int,
        trouble: bool,
        initial: tuple[str, Seen] | None = None,
    ) -> None:
        self.place, self.bands, self.interval = place, bands, interval
        self.trouble, self.initial = trouble, initial
        self.terms = 1.0, 8  # sigma and the batch
        self.saved: list[Saved] = []
        self.seen: Seen = {}  # of all steps begun here, and of initial weights
        place.mkdir()

    def config(self) -> JobConfig:
        config = copy.deepcopy(checked())
        config.privacy.bands = self.bands
        config.privacy.noise_multiplier, config.training.global_batch_size = self.terms
        config.job.dump_folder = str(self.place)
        config.checkpoint.enable, config.checkpoint.interval = True, self.interval
        return config

    def start(self, chosen: random.Random) -> None:
        """Start as the trainer does (`Bookkeeping`), and train."""
        at = self.saved[-1] if self.saved else None
        if at and chosen.random() < 0.3 * self.trouble:  # the newer ones are damaged
            at = chosen.choice(self.saved)
        loaded = None if at is None else Lineage.from_json(at.ledger)
        if loaded is None and not self.seen:
            self.terms = chosen.choice([1.0, 2.0]), chosen.choice([4, 8])
        config = self.config()
        initial, behind = (None, {}) if at or self.initial is None else self.initial
        earlier = earlier_ledger(str(self.place))
        if loaded is not None:
            begun = resumed(config, earlier or loaded, loaded)
        elif earlier is not None:
            begun = rewound(config, earlier, initial)
        else:
            begun = fresh(config, initial)
        log = RunLog(str(self.place))
        ledger = opened(settle(config, UNITS, *begun).ledger, log, losable(config))
        chain = Chain(ledger.run, self.bands, self.terms[0], self.terms[1] / UNITS)
        lineage = both([behind if at is None else at.seen])
        self.seen = both([self.seen, lineage])
        self.look(ledger, lineage)
        self.publish(ledger, lineage)
        unsaved = 0
        for _ in range(chosen.randint(1, 7)):
            step = ledger.steps + 1
            if step > STEPS or unsaved == self.interval:
                break
            log.begin_step(step)
            chain.steps.append(step)
            self.seen = both([self.seen, {chain: len(chain.steps)}])
            unsaved += 1
            if chosen.random() < 0.25 * self.trouble:
                break  # killed within the update
            ledger = dataclasses.replace(ledger, steps=step)
            lineage = both([lineage, {chain: len(chain.steps)}])
            self.look(ledger, lineage)
            if chosen.random() < 0.4:
                self.save(log, ledger, lineage)
                unsaved = 0
        if chain.steps and chain.steps[-1] == ledger.steps:
            self.publish(ledger, lineage)
            if not self.trouble:
                self.save(log, ledger, lineage)
                unsaved = 0
        if unsaved == 0 and chosen.random() >= 0.4 * self.trouble:
            log.end_start(ledger.steps)

    def save(self, log: RunLog, ledger: Lineage, lineage: Seen) -> None:
        self.saved.append(Saved(ledger.to_json(), lineage))
        log.saved(ledger.steps)

    def look(self, ledger: Lineage, lineage: Seen) -> None:
        """Compare everything that is stated at this moment."""
        self.check(ledger, lineage, both([lineage, self.seen]))

    def check(self, ledger: Lineage, seen: Seen, all_seen: Seen) -> None:
        """Compare with what weights show, and with all that was ever begun."""
        for lost, truth in ((False, seen), (True, all_seen)):
            for planned in (0, ledger.left):
                begun = spent_by(ledger, lost=lost)
                check(begun.segments(ledger.settings.mechanism, planned), truth)

    def publish(self, ledger: Lineage, lineage: Seen) -> None:
        stated = write(ledger, self.place)
        assert stated["epsilon"] >= epsilon(lineage) * (1 - 1e-9)
        everything = epsilon(self.seen) * (1 - 1e-9)
        assert stated["epsilon_executed"] >= everything
        assert stated["epsilon_planned"] >= everything

    def release(self, saved: Saved) -> None:
        """Account for one checkpoint's weights as `release.claims` does."""
        self.check(self.account(saved), saved.seen, self.seen)

    def account(self, saved: Saved) -> Lineage:
        published = read_published(str(self.place))
        assert published is not None
        weights = Lineage.from_json(saved.ledger)
        return RunLog(str(self.place)).enter_lost(of_weights(published, weights))

    def opened(self) -> Run:
        log, published = RunLog(str(self.place)), read_published(str(self.place))
        assert published is not None
        return Run(str(self.place), log.enter_lost(published), "same")

    def copied(self, place: Path) -> "Folder":
        """A copy, in which somebody goes on beside this one."""
        other = Folder(place, self.bands, self.interval, self.trouble, self.initial)
        other.saved, other.seen = list(self.saved), dict(self.seen)
        shutil.copytree(self.place, place, dirs_exist_ok=True)
        other.terms = self.terms
        return other


def live(place: Path, chosen: random.Random) -> None:
    trouble = chosen.random() < 0.6  # else the accounts have no lost steps to spare
    first = chosen.choice([2, 3, 4]), chosen.choice([1, 2, 3]), trouble
    folders = [Folder(place / "0", *first)]
    for turn in range(chosen.randint(5, 12)):
        folder, name = chosen.choice(folders), place / f"{turn + 1}"
        kind = chosen.random()
        if kind < 0.15 and folder.seen:
            folders.append(folder.copied(name))
        elif kind < 0.35 and folder.saved:
            saved, place_of = chosen.choice(folder.saved), place / f"hf{turn}"
            export(folder.account(saved), place_of)
            weights = str(place_of), saved.seen
            folders.append(Folder(name, chosen.choice([folder.bands, 2, 4]), 2, trouble, weights))
        folders[-1 if chosen.random() < 0.5 else 0].start(chosen)
    for folder in folders:
        for saved in folder.saved if folder.seen else ():
            folder.release(saved)
    begun = [folder for folder in folders if (folder.place / "privacy.json").exists()]
    everything = both(folder.seen for folder in begun)
    found = total([folder.opened() for folder in begun])
    assert found.epsilon >= epsilon(everything) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(16))
def test_no_account_of_a_history_is_below_the_definition(tmp_path, seed):
    live(tmp_path, random.Random(seed))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 500))
def test_no_account_of_many_histories_is_below_the_definition(tmp_path, seed):
    live(tmp_path, random.Random(seed))
