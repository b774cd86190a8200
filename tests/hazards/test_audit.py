"""Row 35: the whole step, attacked: each planted fault is flagged, the clean build is not. Keys are
fixed, so that few trials suffice; the campaign marked `thorough` plays more cases."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

import torchtitan_dp.distributed  # noqa: F401
from tests.processes.ranks import on_ranks
from torchtitan_dp.audit.game import Game, sizes
from torchtitan_dp.config import Privacy
from torchtitan_dp.config.derived import METHODS
from torchtitan_dp.gradients import optimizer
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import ReduceScatterOverCP
from torchtitan_dp.gradients.norms import RandomizedNorms
from torchtitan_dp.models.causal_lm.settings import LoRA
from torchtitan_dp.privacy.accounting import compose
from torchtitan_dp.privacy.clipping import clip
from torchtitan_dp.privacy.coefficients import found_for
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.lower_bounds import claimed_mu, rate_upper_bound
from torchtitan_dp.privacy.segments import Mechanism, Segment, mechanism_of

SIGMA = 1.0


def mechanism(privacy, bands=1):
    """What the game's steps are accounted for as."""
    estimates = METHODS[privacy.gradient_method].estimates_norms
    terms = {"noise_multiplier": SIGMA, "estimates_norms": estimates}
    column = found_for((1.0,) * 100, bands)
    return mechanism_of(privacy, sample_rate=1.0 / bands, column=column, **terms)


def new_game(degrees, method="microbatch", batch_size=1, adapters=False, bands=1, **terms):
    privacy = Privacy(gradient_method=method, max_grad_norm=0.5, **terms)
    return Game(
        privacy,
        mechanism(privacy, bands),
        batch_size=batch_size,
        degrees=degrees,
        root=RootKey.from_debug_seed(7),
        lora=LoRA(8, 24.0, ("q_proj",), adapters == "B") if adapters else None,
    )


def play_here(degrees, names, trials, fault, confidence, terms):
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        game = new_game(degrees, **terms)
        return {
            case.name: game.play(case, trials=trials, confidence=confidence)["mu_lower_bound"]
            for case in game.cases
            if names is None or case.name in names
        }


def play(*names, trials, fault=None, degrees=(1, 1, 1), confidence=0.95, **terms):
    """The bounds on mu that cases prove (all, if none is named), with a fault in the code."""
    given = (degrees, names or None, trials, fault, confidence, terms)
    bounds, *others = on_ranks(math.prod(degrees), play_here, *given)
    assert all(bounds == other for other in others)
    return bounds


# The faults.


def noise(change, name="add_gaussian_noise_"):
    """Noise with other terms, of one kind: flagged only if the game plays with that kind."""
    add = getattr(optimizer, name)
    patched = lambda flat, **terms: add(flat, **(terms | change(**terms)))  # noqa: E731
    return mock.patch.object(optimizer, name, patched)


def clipping(change):
    patched = lambda *norms, **terms: change(clip(*norms, **terms))  # noqa: E731
    return mock.patch("torchtitan_dp.privacy.clipping.clip", patched)


def no_clipping():
    return clipping(lambda clip: clip._replace(factor_B=torch.ones_like(clip.factor_B)))


def bad_samples_kept():
    def kept(clip):
        factor_B, rejected_B = torch.ones_like(clip.factor_B), torch.zeros_like(clip.rejected_B)
        return clip._replace(factor_B=factor_B, rejected_B=rejected_B)

    return clipping(kept)


@contextlib.contextmanager
def clipping_after_the_sum():
    take = ClippedSum.take

    def take_clipped(self):
        total = take(self)
        norm = torch.cat(list(total.values())).norm()
        return {n: t * (self.policy.max_grad_norm / norm).clamp(max=1) for n, t in total.items()}

    with no_clipping(), mock.patch.object(ClippedSum, "take", take_clipped):
        yield


def one_layers_adapters_left_out():
    """Of the norm: those of the last layer, of parameters that arrive one by one."""
    squared_norms = ClippedSum.squared_norms

    def without_last(self, shards):
        *others, a, b = shards
        return squared_norms(self, [*others, torch.zeros_like(a), torch.zeros_like(b)])

    return mock.patch.object(ClippedSum, "squared_norms", without_last)


def norms_not_reduced():
    silent = SimpleNamespace(all_reduce=lambda tensor, group: None)
    return mock.patch("torchtitan_dp.gradients.clipped_sum.dist", silent)


def samples_summed_over_dp():
    """As FSDP2 itself reduces: over dp_shard too."""
    reduce = ReduceScatterOverCP.__call__

    def reduce_all(self, *terms, **more):
        work = reduce(self, *terms, **more)
        torch.distributed.all_reduce(self._shard_DN)
        return work

    return mock.patch.object(ReduceScatterOverCP, "__call__", reduce_all)


FAULTS = {
    "no noise": lambda: noise(lambda **_: {"std": 0.0}),
    "half the noise": lambda: noise(lambda std, **_: {"std": std / 2}),
    "half the secure noise": lambda: noise(
        lambda std, **_: {"std": std / 2}, "add_secure_gaussian_noise_"
    ),
    "no noise on A": lambda: noise(lambda std, name, **_: {"std": std * (".lora_b." in name)}),
    "no noise on B": lambda: noise(lambda std, name, **_: {"std": std * (".lora_a." in name)}),
    "noise repeated across parameters": lambda: noise(lambda **_: {"name": "any"}),
    "noise named by kind of factor": lambda: noise(
        lambda name, **_: {"name": name.split(".lora_")[1]}
    ),
    "noise named by layer": lambda: noise(lambda name, **_: {"name": name.split(".lora_")[0]}),
    "noise repeated across shards": lambda: mock.patch(
        "torchtitan_dp.gradients.optimizer._flat_start", return_value=0
    ),
    "sensitivity 1": lambda: mock.patch(
        "torchtitan_dp.privacy.segments.column_norm", return_value=1.0
    ),
    "no clipping": no_clipping,
    "clipping after the sum": clipping_after_the_sum,
    "one layer's adapters left out": one_layers_adapters_left_out,
    "bad samples kept": bad_samples_kept,
    "norms not reduced": norms_not_reduced,
    "samples summed over dp": samples_summed_over_dp,
}
ADAPTERS, TWO_CP, TWO_DP = {"adapters": True}, {"degrees": (1, 1, 2)}, {"degrees": (1, 2, 1)}
FLAGGED = [  # a fault, the case that shows it, trials, and what is played
    ("no noise", "norm_C", 30, {}),
    ("half the noise", "norm_C", 100, {}),
    ("half the noise", "norm_C", 70, {"bands": 2}),
    ("half the secure noise", "norm_C", 70, {"secure_noise": True}),
    ("no clipping", "norm_100C", 30, {}),
    ("clipping after the sum", "neighbour", 70, {}),
    ("bad samples kept", "not_a_number", 30, {}),
    ("noise repeated across parameters", "twin_parameters", 40, {}),
    ("noise repeated across shards", "twin_halves", 40, TWO_CP),
    ("samples summed over dp", "neighbour", 70, TWO_DP),
    ("no noise on A", "norm_C", 30, ADAPTERS),
    ("no noise on B", "norm_100C", 30, ADAPTERS),
    ("no noise on B", "norm_C", 30, {"adapters": "B"}),
]
CAMPAIGN = [
    ("sensitivity 1", "norm_C", 500, {"bands": 16}),
    ("norms not reduced", "norm_100C", 500, TWO_CP),
    ("norms not reduced", "norm_100C", 500, TWO_CP | ADAPTERS),
    ("noise repeated across shards", "twin_halves", 40, TWO_CP | ADAPTERS),
    ("samples summed over dp", "neighbour", 100, TWO_DP | ADAPTERS),
    ("half the noise", "norm_100C", 150, ADAPTERS),
    ("no clipping", "neighbour", 50, ADAPTERS),
    ("noise named by kind of factor", "twin_parameters", 50, ADAPTERS),
    ("noise named by layer", "twin_parameters", 50, ADAPTERS),
]
WAYS = {
    "microbatch": {},
    "secure": {"secure_noise": True},
    "V1": {"method": "grad_sample", "batch_size": 2, "shard_grad_samples": False},
    "V2": {"method": "grad_sample", "batch_size": 2},
    "ghost": {"method": "ghost", "batch_size": 2},
    "ghost, two passes": {"method": "ghost", "batch_size": 2, "ghost_passes": "two"},
    "per layer": {"method": "grad_sample", "batch_size": 2, "clipping": "per_layer"},
    "per layer, ghost": {"method": "ghost", "batch_size": 2, "clipping": "per_layer"},
    "capped estimates": {"method": "randomized", "batch_size": 2, "projections": 16},
    "correlated": {"bands": 4},
    "B alone": {"adapters": "B"},
}


def stays_under_the_claim(bounds, least=0.1):
    """It does, and the attack sees about what it may."""
    assert max(bounds.values()) <= 1 / SIGMA
    assert bounds.pop("not_a_number") < 0.1
    assert min(bounds.values()) > least


@pytest.mark.thorough_cases(*[*WAYS][1:])
@pytest.mark.parametrize("method", WAYS)
def test_row35_and_63_the_clean_build_stays_under_the_claim(method):
    trials, confidence = (100, 0.99) if method == "microbatch" else (300, 0.999)
    stays_under_the_claim(play(trials=trials, confidence=confidence, **WAYS[method]))


@pytest.mark.parametrize(
    "fault, case, trials, terms",
    [*FLAGGED, *(pytest.param(*row, marks=pytest.mark.thorough) for row in CAMPAIGN)],
)
def test_row35_49_56_and_63_flags(fault, case, trials, terms):
    if "degrees" in terms:
        assert play(case, trials=40, **terms)[case] <= 1 / SIGMA
    assert play(case, trials=trials, fault=fault, **terms)[case] > 1 / SIGMA


def play_in_one_layer(fault, factors, trials):
    """The bound that a gradient of 100 C proves which lies in one factor of the last layer."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        game = new_game((1, 1, 1), "grad_sample", 2, adapters=True)
        (case,) = (case for case in game.cases if case.name == "norm_100C")
        along_PN = case.along_PN.clone()
        along_PN[0] = 0
        along_PN /= along_PN.norm()
        with_UPN = torch.stack([torch.zeros_like(along_PN), 100 * along_PN])
        terms = {"with_UPN": with_UPN, "along_PN": along_PN, "factors": factors}
        case = dataclasses.replace(case, **terms)
        return game.play(case, trials=trials, confidence=0.95)["mu_lower_bound"]


@pytest.mark.parametrize("fault, trials", [(None, 70), ("one layer's adapters left out", 50)])
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.0, 1.0)], ids=["B", "A"])
def test_row35_and_56_adapters_left_out_of_the_norm_are_flagged(factors, fault, trials):
    (bound,) = on_ranks(1, play_in_one_layer, fault, factors, trials)
    assert bound > 0.1
    assert (bound > 1 / SIGMA) == (fault is not None)


@pytest.mark.thorough_cases("None-*", "*-hutch++")
@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("fault", [None, "half the noise"])
def test_row35_and_75_with_estimated_norms_the_claim_is_a_mixtures(fault, estimator):
    """On gradients of rank one, whose estimates err most: above 1 / sigma, and not by much."""
    terms = {"norm_estimator": estimator, "projections": 16, "underestimates": "accounted"}
    names = ["norm_100C"] if fault else ["norm_C", "norm_100C", "not_a_number"]
    often = {"trials": 100 if fault else 300, "confidence": 0.95 if fault else 0.999}
    bounds = play(*names, fault=fault, method="randomized", batch_size=2, **often, **terms)
    claim = claimed_mu(mechanism(Privacy(gradient_method="randomized", **terms)), **often)
    assert 1 / SIGMA < claim < 1.4 / SIGMA
    assert (bounds["norm_100C"] > claim) == (fault is not None)
    if fault is None:
        assert max(bounds.values()) <= claim
        assert bounds["norm_100C"] > 0.1
        assert bounds["not_a_number"] < 0.1


SIGMA_OF_ROUND, ROUND, DELTA = 0.7, 4, 0.1


def bounds_on_a_round(trials):
    """The epsilon that trials of a round of random allocation prove at `DELTA`: of an attacker who
    has all its steps and does not know the unit's, and of one who does."""
    mechanism = Mechanism(SIGMA_OF_ROUND, 1 / ROUND, round_steps=ROUND)
    claim = compose([Segment(mechanism, ROUND)], delta=DELTA, accountant="pld")
    terms = {"batch_size": 1, "degrees": (1, 1, 1), "root": RootKey.from_debug_seed(7)}
    privacy = Privacy(gradient_method="microbatch", sampling="allocation", max_grad_norm=0.5)
    game = Game(privacy, mechanism, **terms)
    case = game.cases[0]  # of one unit alone
    without, with_it = (
        game.scores(case, case.without_UPN, trials * ROUND).reshape(trials, ROUND) for _ in range(2)
    )
    secret = np.random.default_rng(0).integers(ROUND, size=trials)
    with_it[np.arange(trials), secret] = game.scores(case, case.with_UPN, trials)
    losses, losses_with = ((x - 0.5) / SIGMA_OF_ROUND**2 for x in (without, with_it))

    def proven(losses, losses_with):
        errors = int((losses >= claim).sum()), int((losses_with < claim).sum())
        alarms, missed = (rate_upper_bound(n, trials, 0.995) for n in errors)
        return math.log(max(1 - missed - DELTA, 1e-9) / alarms)

    hidden = proven(*(logsumexp(x, 1) - math.log(ROUND) for x in (losses, losses_with)))
    return hidden, proven(losses[:, 0], losses_with[np.arange(trials), secret]), claim


@pytest.mark.thorough
def test_row35_and_74_a_hidden_step_of_a_round_proves_less_than_the_claim():
    """And a known one more: that a unit's step is secret is what allocation is accounted for."""
    ((hidden, known, claim),) = on_ranks(1, bounds_on_a_round, 1000)
    assert 0 < hidden < claim < known


def estimated_matrices(adapters):
    """How many of the game's matrices have estimated norms."""
    game, draw = new_game((1, 1, 1), "randomized", 2, adapters), RandomizedNorms._draw
    with mock.patch.object(RandomizedNorms, "_draw", autospec=True, side_effect=draw) as drawn:
        game.scores(game.cases[0], game.cases[0].with_UPN, 1)
    return drawn.call_count


@pytest.mark.parametrize("adapters, matrices", [("", 2), ("A, B", 4), ("B", 2)])
def test_row75_the_game_plays_with_estimates(adapters, matrices):
    assert on_ranks(1, estimated_matrices, adapters) == [matrices]


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("projections", [1, 16, 33, 100])
def test_row75_the_game_plays_with_estimates_on_any_mesh(projections, estimator):
    exact = Privacy(gradient_method="ghost")
    assert sizes(exact, ranks=64, cp=8) == (1, 512, 1)  # small where norms are exact
    terms = {"projections": projections, "norm_estimator": estimator}
    privacy = Privacy(gradient_method="randomized", **terms)
    for ranks in (*range(1, 34), 64, 96, 255, 256):
        for cp in (cp for cp in range(1, ranks + 1) if ranks % cp == 0):
            tokens, rows, columns = sizes(privacy, ranks=ranks, cp=cp)
            assert rows % ranks == 0
            assert rows >= 8 * ranks
            for width in (columns, rows):  # of a layer, of its factors
                room = projections * (cp * tokens + rows + width)
                assert room < min(2 * (cp * tokens) ** 2, rows * width), (ranks, cp)


# The command.
