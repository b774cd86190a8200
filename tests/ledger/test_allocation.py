"""Row 74: rounds of random allocation in the ledger, over starts, crashes and ancestors."""

from dataclasses import replace

import pytest

from tests import build
from tests.accounts import begun
from torchtitan_dp.checkpoint.plan import settle
from torchtitan_dp.ledger import Lineage, RunLog, Settings
from torchtitan_dp.ledger.lineage import Ancestor, History
from torchtitan_dp.ledger.spending import epsilon, spent
from torchtitan_dp.privacy.accounting import compose
from torchtitan_dp.privacy.segments import Mechanism, Segment, composition

T = 4
MECHANISM = Mechanism(2.0, 1 / T, round_steps=T)
SETTINGS = Settings(
    MECHANISM, 0.5, 1e-5, 5, "pld", "privacy.sample_rate", "add_remove", sampling="allocation"
)


def rounds(segments):
    parts = composition(segments)
    assert all((part.noise_multiplier, part.round_steps) == (2.0, T) for part in parts)
    return sum(part.steps for part in parts)


def test_row74_rounds_that_crashes_cut_are_counted_whole(tmp_path):
    lineage = Lineage(SETTINGS, planned_steps=16)
    lineage = begun(lineage, tmp_path, 1, loses=3)  # killed: of the 4 steps of a round
    lineage = begun(replace(lineage, steps=0), tmp_path, 3, loses=3)
    lost = RunLog(str(tmp_path)).enter_lost(replace(lineage, steps=0))
    assert lost.lost == 2 * T
    assert rounds(spent(lost)) == 2
    assert rounds(spent(lost, lost.left)) == 2 + 4


def test_row74_a_start_inside_a_round_is_refused_unless_nothing_is_left():
    rounds_of_4 = "--training.steps=16", "--privacy.sampling=allocation"
    config = build.config(*rounds_of_4, "--privacy.accountant=pld", "--privacy.noise_multiplier=2")
    config.job.dump_folder = "/nowhere"
    units = 4 * config.training.global_batch_size
    for steps in range(17):
        history = History(steps=steps, planned_steps=16)
        if steps % T and steps < 16:
            with pytest.raises(ValueError, match=f"after step {steps}, are inside a round of 4"):
                settle(config, units, history, None)
        else:
            assert settle(config, units, history, None).ledger.steps == steps


@pytest.mark.parametrize("back", [False, True])
def test_row74_a_change_of_sampling_is_refused_on_a_resume(back):
    """Also at the same noise and rate, where no other key differs."""
    poisson = replace(SETTINGS, mechanism=Mechanism(2.0, 1 / T), sampling="poisson")
    now, before = (poisson, SETTINGS) if back else (SETTINGS, poisson)
    with pytest.raises(ValueError, match=r"privacy\.sampling = "):
        now.resumed(since=before)


@pytest.mark.parametrize("steps, count", [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4), (17, 5)])
def test_a_stop_inside_a_round_counts_the_round(steps, count):
    assert rounds(spent(Lineage(SETTINGS, steps=steps))) == count


@pytest.mark.parametrize("allocated_first", [False, True])
def test_rounds_compose_with_an_ancestor_that_was_poisson_sampled(allocated_first):
    poisson = replace(SETTINGS, mechanism=Mechanism(2.0, 1 / T), sampling="poisson")
    first, then = (SETTINGS, poisson) if allocated_first else (poisson, SETTINGS)
    lineage = Lineage(then, steps=6, ancestors=(Ancestor("before", first, 5, 5, 0),))
    parts = [(MECHANISM, 8), (poisson.mechanism, 6 if allocated_first else 5)]
    expected = compose([Segment(*part) for part in parts], delta=1e-5, accountant="pld")
    assert epsilon(lineage) == pytest.approx(expected, rel=1e-9)
