"""A mechanism that nobody knows but its class: ledger, log, `privacy.json`, epsilon and card."""

import json
import math
from dataclasses import dataclass, replace

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from tests.accounts import begun, ended, publish
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.ledger import Lineage, Settings, read_published, schema, summary
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.privacy import mechanism as mechanisms
from torchtitan_dp.privacy.mechanism import PoissonGaussian
from torchtitan_dp.privacy.segments import GaussianSteps, Mechanism


@dataclass(frozen=True)
class Twice(Mechanism):
    """Two draws a step, of noise sqrt(2) * sigma times and by `spread`."""

    spread: float = 1.0

    keys = (("spread", float, "What the two noise multipliers differ by."),)
    name = "two_draws_a_step"
    caveat = "each step drew twice"

    def composition(self, steps):
        noise = math.sqrt(2) * self.noise_multiplier
        return tuple(
            GaussianSteps(sigma, self.sample_rate, steps)
            for sigma in (noise * self.spread, noise / self.spread)
        )

    @property
    def norms(self):
        return f"two draws, spread {self.spread}"

    def terms(self):
        return {"privacy.spread": self.spread}


TOY = Twice(1.0, 0.05, 1.25)
SETTINGS = Settings(TOY, 0.5, 1e-5, 5, "pld", "privacy.sample_rate", "add_remove")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(mechanisms, "MECHANISMS", (*mechanisms.MECHANISMS, Twice))
    monkeypatch.setattr(schema, "KEYS", (*schema.KEYS, *schema.keys_of(Twice)))
    monkeypatch.setattr(schema, "_OF_MECHANISMS", {*schema._OF_MECHANISMS, "spread"})


def by_dp_accounting(steps):
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    for part in TOY.composition(steps):
        step = dp_accounting.GaussianDpEvent(part.noise_multiplier)
        step = dp_accounting.PoissonSampledDpEvent(part.sample_rate, step)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, part.steps))
    return accountant.get_epsilon(1e-5)


def test_epsilon_is_that_of_its_composition():
    found = SETTINGS.epsilon(40)
    assert found == pytest.approx(by_dp_accounting(40), rel=2e-3)
    once = replace(SETTINGS, mechanism=PoissonGaussian(1.0, 0.05))
    assert found < 0.9 * once.epsilon(40)


def test_its_run_is_logged_published_verified_and_read(tmp_path):
    lineage = ended(Lineage(SETTINGS, planned_steps=9), tmp_path, 4)
    published = publish(lineage, tmp_path)
    assert published["mechanism"] == "two_draws_a_step"
    assert published["epsilon"] == pytest.approx(by_dp_accounting(4), rel=2e-3)
    assert published["epsilon_planned"] == pytest.approx(by_dp_accounting(9), rel=2e-3)
    assert len(published["dp_event"]["events"]) == 2
    assert any("drew twice" in caveat for caveat in published["caveats"])
    assert "two draws, spread 1.25" in " ".join(summary(published))
    assert verify(str(tmp_path)).faults == []
    assert json.loads((tmp_path / "privacy.json").read_text())["spread"] == 1.25
    assert replace(read_published(str(tmp_path)), caveats=()) == replace(lineage, start="")
    assert Lineage.from_json(lineage.to_json()) == lineage


def test_lost_steps_are_of_it(tmp_path):
    begun(Lineage(SETTINGS), tmp_path, 3, loses=4)
    published = publish(ended(Lineage(SETTINGS), tmp_path, 2), tmp_path)
    assert published["epsilon_executed"] == pytest.approx(by_dp_accounting(6), rel=2e-3)


def test_a_resume_with_another_parameter_is_refused():
    now = replace(SETTINGS, mechanism=replace(TOY, spread=1.5))
    with pytest.raises(ValueError, match=r"privacy\.spread = 1\.5: .* started with 1\.25"):
        now.resumed(since=SETTINGS)


def test_its_card_states_it(tmp_path):
    from tests import build
    from torchtitan_dp.release.card import model_card

    behind = Ancestor("before", SETTINGS, 1, 1, 0)
    published = publish(Lineage(SETTINGS, steps=4, ancestors=(behind,)), tmp_path)
    card = model_card({**published, "epsilon_counts": "planned_steps"}, build.config(), build.ARGS)
    assert "| before that | 1 steps with σ = 1, q = 0.05, two draws, spread 1.25 |" in card


def test_a_mechanism_that_is_no_longer_known_is_refused(tmp_path, monkeypatch):
    lineage = Lineage(SETTINGS, steps=2)
    publish(lineage, tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"privacy\.json"):
        read_published(str(tmp_path))
    with pytest.raises((ValueError, KeyError)):
        Lineage.from_json(lineage.to_json())
