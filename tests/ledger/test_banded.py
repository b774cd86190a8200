"""Banded noise in the ledger: what chains, groups, lost steps and several runs spend together."""

from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from tests.accounts import begun
from torchtitan_dp.ledger import Lineage, RunLog, Settings
from torchtitan_dp.ledger.spending import Run, spent, total
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.segments import Mechanism, Segment, composition

BANDS = 4
MECHANISM = Mechanism(1.0, 0.05, column=cut_off(BANDS))
SETTINGS = Settings(MECHANISM, 0.5, 1e-5, 5, "pld", "privacy.sample_rate", "add_remove")


def rounds(segments):
    """How often the most that a unit is drawn, by `composition`: of MECHANISM's noise and rate."""
    parts = composition(segments)
    assert all((p.noise_multiplier, p.sample_rate) == (1.0, 4 * 0.05) for p in parts)
    return sum(part.steps for part in parts)


def by_dp_accounting(rounds):
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, rounds))
    return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("steps, count", [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)])
def test_steps_in_a_row_are_rounds(steps, count):
    assert rounds([Segment(MECHANISM, steps)]) == count
    kept = Lineage(SETTINGS, steps=steps // 2, planned_steps=steps)  # a stop costs nothing
    assert rounds(spent(kept, kept.left)) == count


def test_epsilon_is_that_of_the_rounds():
    assert SETTINGS.epsilon(14) == pytest.approx(by_dp_accounting(4), rel=2e-3)
    sigma = accounting.noise_for(MECHANISM, 14, target_epsilon=3.0, delta=1e-5, accountant="pld")
    assert 2.97 <= replace(SETTINGS, mechanism=MECHANISM.with_noise(sigma)).epsilon(14) <= 3.0


def test_row58_two_runs_count_a_group_in_both():
    """In another run, or in a copy that went on elsewhere, a unit may be of another group."""
    runs = [Run(name, Lineage(SETTINGS, steps=2, run="one"), "f") for name in "ab"]
    assert total(runs).epsilon == pytest.approx(by_dp_accounting(2), rel=2e-3)


@pytest.mark.parametrize("loses, whole", [(1, 4), (4, 4), (6, 8)])
def test_each_crash_loses_whole_rounds(tmp_path, loses, whole):
    """Or steps of one group that several crashes lost would count as steps in a row."""
    for crashes in (1, 2):
        begun(Lineage(SETTINGS), tmp_path, 1, loses=loses)
        lineage = RunLog(str(tmp_path)).enter_lost(Lineage(SETTINGS, steps=2))
        assert lineage.lost == crashes * whole
        assert rounds(spent(lineage)) == 1 + crashes * whole // BANDS
