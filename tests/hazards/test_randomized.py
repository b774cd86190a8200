"""Row 75: what estimated norms are accounted for is what they are made from, wherever epsilon is
told; and what the accounting does not cover is refused.
"""

import itertools
from dataclasses import replace

import pytest

from tests import build
from tests.accounts import publish, steps_of
from tests.hazards.test_trainer import ROOT, SETTINGS, STEP, Step
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint.folder import verify
from torchtitan_dp.checkpoint.plan import settings_of
from torchtitan_dp.ledger import Lineage, summary
from torchtitan_dp.ledger.lineage import Ancestor
from torchtitan_dp.ledger.schema import read_published
from torchtitan_dp.ledger.spending import Run, total
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.release.card import model_card

EXACT = replace(SETTINGS, accountant="pld", mechanism=Mechanism(1.0, 0.05))
ESTIMATED = replace(
    EXACT, mechanism=Mechanism(1.0, 0.05, projections=32, norm_estimator="hutchinson")
)
CAPPED = ["--privacy.gradient_method=randomized", "--training.local_batch_size=2"]
METHOD = [*CAPPED, "--privacy.underestimates=accounted"]


def spent(steps, k, noise=1.0):
    return accounting.compose([steps_of(noise, 0.05, steps, k)], delta=1e-5, accountant="pld")


def card_of(published):
    """The model card of a run with these terms."""
    return model_card({**published, "epsilon_counts": "planned_steps"}, build.config(), build.ARGS)


def accounted_and_drawn(options):
    overrides = [*METHOD, *options]
    norms = build.build((1, 1, 1), *overrides).gradients.norms
    settings = settings_of(build.config(*overrides), units=100, noise_multiplier=1.0)
    mechanism = settings.mechanism
    return (
        (
            mechanism.projections,
            mechanism.norm_estimator,
            settings.segment(7).mechanism.projections,
        ),
        (norms.k, norms.estimator),
    )


@pytest.mark.parametrize("k, estimator", [(32, "hutchinson"), (64, "hutch++")])
def test_row75_what_is_accounted_is_what_is_drawn(k, estimator):
    options = [f"--privacy.projections={k}", f"--privacy.norm_estimator={estimator}"]
    (found,) = on_ranks(1, accounted_and_drawn, options)
    assert found == ((k, estimator, k), (k, estimator))


HUTCH = replace(EXACT, mechanism=Mechanism(1.0, 0.05, 0, 32, "hutch++"))


def terms_of(*overrides):
    return settings_of(build.config(*overrides), units=100, noise_multiplier=1.0)


CHANGED = ([], ["--privacy.projections=64"], ["--privacy.norm_estimator=hutch++"])


def test_row31_and_75_norms_are_terms_of_a_run_and_capped_ones_spend_as_exact_ones_do():
    ghost, other = terms_of("--privacy.gradient_method=ghost"), terms_of("--privacy.projections=64")
    assert ghost.mechanism == Mechanism(1.0, ghost.mechanism.sample_rate)
    assert ghost == other
    capped = terms_of(*CAPPED)
    more = terms_of(*CAPPED, "--privacy.projections=64", "--privacy.norm_estimator=hutch++")
    for one, k, name in ((capped, 32, "hutchinson"), (more, 64, "hutch++")):
        assert (one.mechanism.capped_projections, one.mechanism.norm_estimator) == (k, name)
    assert ghost.epsilon(7) == capped.epsilon(7) == more.epsilon(7)
    estimated = [terms_of(*METHOD, *changed) for changed in CHANGED]
    for one, to_come in itertools.permutations((ghost, capped, more, *estimated), 2):
        with pytest.raises(ValueError, match=r"^privacy\.(gradient_method|projections|norm_est)"):
            to_come.resumed(since=one)


def test_row24_and_67_people_are_told_of_capped_norms(tmp_path):
    """By which estimates, and that nothing counts more than C for all that."""
    behind = (Ancestor("a", HUTCH, 1, 1, 0), Ancestor("b", EXACT, 1, 1, 0))
    lineage = Lineage(HUTCH, steps=1, planned_steps=1, ancestors=behind)
    published = publish(lineage, tmp_path)
    assert (published["projections"], published["capped_projections"]) == (0, 32)
    assert published["norm_estimator"] == "hutch++"
    assert published["mechanism"] == EXACT.mechanism.name
    assert published["epsilon"] == pytest.approx(spent(3, 0), rel=1e-6)
    assert not any("norms were estimated" in caveat for caveat in published["caveats"])
    assert "norms from 32 projections, capped, pld" in " ".join(summary(published))
    card = card_of(published)
    assert "random projections (hutch++, 32 of them)" in card
    assert "a unit counts at most C and ε is that of exact norms" in card
    assert "its gradient is clipped to norm C" in card
    first, second = [line for line in card.splitlines() if "before that" in line]
    assert first.endswith("norms from 32 projections, capped |")
    assert "norms" not in second
    assert verify(str(tmp_path)).faults == []
    assert read_published(str(tmp_path)) == lineage


@pytest.mark.parametrize("options, counted", [(CAPPED, 0), (METHOD, 32)])
def test_row75_what_is_capped_is_what_is_accounted_as_exact(options, counted):
    """The step's own cap, beside the terms of the ledger."""
    (cap,) = on_ranks(1, cap_of_an_estimate, options)
    mechanism = terms_of(*options).mechanism
    assert mechanism.projections == counted
    assert cap == mechanism.largest_share


def cap_of_an_estimate(options):
    norms = build.build((1, 1, 1), *options).gradients.norms
    norms._estimated.add("w")
    return norms.cap("w")


def test_row75_every_epsilon_of_a_run_counts_estimates(tmp_path):
    published = publish(Lineage(ESTIMATED, steps=30, planned_steps=40), tmp_path)
    assert published["epsilon"] == pytest.approx(spent(30, 32), rel=1e-6)
    assert published["epsilon_executed"] == pytest.approx(spent(30, 32), rel=1e-6)
    assert published["epsilon_planned"] == pytest.approx(spent(40, 32), rel=1e-6)
    assert published["epsilon"] > 1.1 * spent(30, 0)
    assert (published["projections"], published["norm_estimator"]) == (32, "hutchinson")
    assert published["mechanism"] == ESTIMATED.mechanism.name
    (event,) = published["dp_event"]["events"]
    assert event["event"]["class_name"] == "MixtureOfGaussiansDpEvent"
    assert any("norms were estimated" in caveat for caveat in published["caveats"])
    assert not any("C instead of C" in caveat for caveat in published["caveats"])


def test_row11_and_67_a_step_has_a_projection_key_of_its_own(monkeypatch):
    """Before its first sample; no other stream has it."""
    step = Step(monkeypatch)
    (call,) = step.trainer.gradients.start_step.call_args_list
    assert call.args == (RootKey(ROOT).stream("projection").take(STEP),)
    assert call.args != (step.noise.key,)


def test_row75_a_step_tells_methods_by_which_number_each_unit_was_drawn(monkeypatch):
    """Not by which microbatch it is in: what else is drawn would number it."""
    step = Step(monkeypatch)
    assert step.positions == step.draws[0].tolist() != list(range(len(step.positions)))


def test_row24_and_67_people_are_told_of_estimates(tmp_path):
    """The card, the summary and the caveats do not promise a norm of at most C."""
    published = publish(Lineage(ESTIMATED, steps=3, planned_steps=3), tmp_path)
    card = card_of(published)
    assert "random projections (hutchinson, 32 of them)" in card
    assert "at most 2.14 C" in card
    assert "norms from 32 projections" in " ".join(summary(published))
    exact = card_of(published | EXACT.mechanism.fields())
    assert "its gradient is clipped to norm C" in exact
    assert "| clipping | to norm C = 0.5, flat, vanilla |" in exact


def test_row75_several_runs_add_up_by_pld():
    runs = [
        Run(a, Lineage(replace(s, accountant=a), steps=10, run=a), "f")
        for s, a in ((EXACT, "rdp"), (ESTIMATED, "pld"))
    ]
    found = total(runs)
    assert found.accountant == "pld"
    assert spent(20, 0) < found.epsilon < spent(20, 32)
