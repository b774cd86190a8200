"""Row 35: the whole step, attacked. Each planted fault is flagged; the clean build is not.

Also what the canary audit rests on: an included canary adds C at its place each time it is drawn,
an excluded one adds exactly nothing, on every mesh and with every gradient method.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.processes import forks
from tests.processes.ranks import on_ranks
from tests.processes.runs import CONFIG, write_records

SIGMA = 1.0


SECURE = {"secure_noise": True}
PER_LAYER = {"clipping": "per_layer"}
V1 = {"shard_grad_samples": False}
TWO = {"ghost_passes": "two"}


def new_game(degrees, method, batch_size, summed, adapters=False, bands=1):
    import torchtitan_dp.distributed  # noqa: F401

    # isort: split
    from torchtitan_dp.audit.game import Game
    from torchtitan_dp.config import Privacy
    from torchtitan_dp.models.lora import LoRA
    from torchtitan_dp.privacy.keys import RootKey

    privacy = Privacy(gradient_method=method, max_grad_norm=0.5, **summed)
    return Game(
        privacy,
        mechanism(privacy, bands),
        batch_size=batch_size,
        degrees=degrees,
        root=RootKey.from_debug_seed(7),
        lora=LoRA(8, 24.0, ("wq",)) if adapters else None,
    )


def mechanism(privacy, bands=1):
    """What the game's steps are accounted for as."""
    from torchtitan_dp.gradients.methods import METHODS
    from torchtitan_dp.privacy.mechanism import mechanism_of

    estimates = METHODS[privacy.gradient_method].estimates_norms
    terms = {"noise_multiplier": SIGMA, "estimates_norms": estimates}
    return mechanism_of(privacy, sample_rate=1.0 / bands, bands=bands, **terms)


def play(
    degrees,
    names,
    trials,
    fault=None,
    method="microbatch",
    batch_size=1,
    confidence=0.95,
    summed=None,
    adapters=False,
    bands=1,
):
    """The bounds on mu that the named cases prove, with a fault in the code."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        game = new_game(degrees, method, batch_size, summed or {}, adapters, bands)
        return {
            case.name: game.play(case, trials=trials, confidence=confidence).mu
            for case in game.cases
            if names is None or case.name in names
        }


def play_one(fault, degrees, case, trials, adapters=False):
    """By rank, what `play` returns of one case."""
    terms = "microbatch", 1, 0.95, None, adapters
    return on_ranks(math.prod(degrees), play, degrees, [case], trials, fault, *terms)


# The faults.


@contextlib.contextmanager
def scaled_noise(scale, *names):
    """Of one kind of noise, so that a game flags it only if that is the kind it plays with."""
    from torchtitan_dp import optimizer

    def scaled(add):
        return lambda flat, *, std, **terms: add(flat, std=scale * std, **terms)

    with contextlib.ExitStack() as stack:
        for name in names or ("add_gaussian_noise_",):
            patch = mock.patch.object(optimizer, name, scaled(getattr(optimizer, name)))
            stack.enter_context(patch)
        yield


def no_clipping():
    from torchtitan_dp.privacy.clipping import clip as real_clip

    def unclipped(squared_norm_B, valid_B, **terms):
        clipped = real_clip(squared_norm_B, valid_B, **terms)
        return clipped._replace(factor_B=torch.ones_like(clipped.factor_B))

    return mock.patch("torchtitan_dp.privacy.clipping.clip", unclipped)


@contextlib.contextmanager
def clipping_after_the_sum():
    from torchtitan_dp.gradients.clipped_sum import ClippedSum

    take = ClippedSum.take

    def take_clipped(self):
        total = take(self)
        norm = torch.cat(list(total.values())).norm()
        return {n: t * (self.policy.max_grad_norm / norm).clamp(max=1) for n, t in total.items()}

    with no_clipping(), mock.patch.object(ClippedSum, "take", take_clipped):
        yield


def one_layers_adapters_left_out():
    """Of the norm: those of the last layer, of parameters that arrive one by one."""
    from torchtitan_dp.gradients.clipped_sum import ClippedSum

    squared_norms = ClippedSum.squared_norms

    def without_last(self, shards):
        *others, a, b = shards
        return squared_norms(self, [*others, torch.zeros_like(a), torch.zeros_like(b)])

    return mock.patch.object(ClippedSum, "squared_norms", without_last)


def bad_samples_kept():
    from torchtitan_dp.privacy.clipping import clip as real_clip

    def keep_all(squared_norm_B, valid_B, **terms):
        clipped = real_clip(squared_norm_B, valid_B, **terms)
        return clipped._replace(
            factor_B=torch.ones_like(clipped.factor_B),
            rejected_B=torch.zeros_like(clipped.rejected_B),
        )

    return mock.patch("torchtitan_dp.privacy.clipping.clip", keep_all)


def noise_repeated_across_shards():
    return mock.patch("torchtitan_dp.optimizer._flat_start", return_value=0)


def noise_named(rename):
    """Noise repeated across the parameters whose names become the same."""
    from torchtitan_dp.privacy import noise

    def add(flat, *, name, **terms):
        noise.add_gaussian_noise_(flat, name=rename(name), **terms)

    return mock.patch("torchtitan_dp.optimizer.add_gaussian_noise_", add)


def no_noise_on(kind):
    from torchtitan_dp.privacy import noise

    def add(flat, *, name, std, **terms):
        noise.add_gaussian_noise_(flat, name=name, std=0.0 if kind in name else std, **terms)

    return mock.patch("torchtitan_dp.optimizer.add_gaussian_noise_", add)


def norms_not_reduced():
    silent = SimpleNamespace(all_reduce=lambda tensor, group: None)
    return mock.patch("torchtitan_dp.gradients.clipped_sum.dist", silent)


def samples_summed_over_dp():
    """As FSDP2 itself reduces: over dp_shard too."""
    from torchtitan_dp.gradients.fsdp import ReduceScatterOverCP

    reduce = ReduceScatterOverCP.__call__

    def reduce_all(self, *terms, **more):
        work = reduce(self, *terms, **more)
        torch.distributed.all_reduce(self._shard_DN)
        return work

    return mock.patch.object(ReduceScatterOverCP, "__call__", reduce_all)


FAULTS = {
    "no noise": lambda: scaled_noise(0.0),
    "half the noise": lambda: scaled_noise(0.5),
    "half the secure noise": lambda: scaled_noise(0.5, "add_secure_gaussian_noise_"),
    "no clipping": no_clipping,
    "clipping after the sum": clipping_after_the_sum,
    "one layer's adapters left out": one_layers_adapters_left_out,
    "bad samples kept": bad_samples_kept,
    "noise repeated across shards": noise_repeated_across_shards,
    "noise repeated across parameters": lambda: noise_named(lambda name: "any"),
    "noise named by kind of factor": lambda: noise_named(lambda name: name.split(".lora_")[1]),
    "noise named by layer": lambda: noise_named(lambda name: name.split(".lora_")[0]),
    "no noise on A": lambda: no_noise_on(".lora_a."),
    "no noise on B": lambda: no_noise_on(".lora_b."),
    "norms not reduced": norms_not_reduced,
    "samples summed over dp": samples_summed_over_dp,
    "sensitivity 1": lambda: mock.patch(
        "torchtitan_dp.privacy.mechanism.column_norm", return_value=1.0
    ),
}


@pytest.mark.thorough_cases(
    "capped estimates",
    "ghost",
    "ghost, two passes",
    "grad_sample",
    "per layer",
    "per layer, ghost",
    "per layer, microbatch",
    "secure",
)
@pytest.mark.parametrize(
    "method, batch_size, summed",
    [
        ("microbatch", 1, {}),
        ("grad_sample", 2, {}),
        ("microbatch", 1, SECURE),
        ("ghost", 2, {}),
        ("ghost", 2, TWO),
        ("grad_sample", 2, PER_LAYER),
        ("microbatch", 1, PER_LAYER),
        ("ghost", 2, PER_LAYER),
        ("randomized", 2, {"projections": 16}),
    ],
    ids=[
        *("microbatch", "grad_sample", "secure", "ghost", "ghost, two passes"),
        *("per layer", "per layer, microbatch", "per layer, ghost"),
        "capped estimates",
    ],
)
def test_row35_the_clean_build_stays_under_the_claim(method, batch_size, summed):
    (bounds,) = on_ranks(1, play, (1, 1, 1), None, 300, None, method, batch_size, 0.999, summed)
    assert len(bounds) == 6
    assert max(bounds.values()) <= 1 / SIGMA
    assert bounds.pop("not_a_number") < 0.1
    assert min(bounds.values()) > 0.1  # the attack works: it sees about what it may


ADAPTERS = {
    "microbatch": ("microbatch", 1, {}),
    "V1": ("grad_sample", 2, V1),
    "V2": ("grad_sample", 2, {}),
    "ghost": ("ghost", 2, {}),
    "ghost, two passes": ("ghost", 2, TWO),
    "capped estimates": ("randomized", 2, {"projections": 16}),
    "per layer": ("grad_sample", 2, PER_LAYER),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "degrees, method",
    [*(((1, 1, 1), method) for method in ADAPTERS), ((1, 1, 2), "V2"), ((1, 2, 1), "microbatch")],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_row35_and_56_with_adapters_it_stays_under_the_claim(degrees, method):
    gradient_method, batch_size, terms = ADAPTERS[method]
    arguments = None, 300, None, gradient_method, batch_size, 0.999, terms, True
    bounds, *others = on_ranks(math.prod(degrees), play, degrees, *arguments)
    assert all(bounds == other for other in others)
    assert max(bounds.values()) <= 1 / SIGMA
    assert bounds.pop("not_a_number") < 0.1
    # Of four groups that share C two may have no gradient, and of each of four estimated matrices
    # no more counts than its estimate: less is there to be seen.
    assert min(bounds.values()) > (0 if method in ("per layer", "capped estimates") else 0.1)


def adapters_of_the_command(*options):
    """With which adapters the command plays on a configuration's terms."""
    import torchtitan_dp.audit.__main__ as audit
    from tests import build
    from torchtitan_dp.privacy.keys import RootKey

    config, root = build.config(*options), RootKey.from_debug_seed(7)
    settings = SimpleNamespace(mechanism=mechanism(config.privacy), delta=1e-5)
    plan = SimpleNamespace(settings=settings)
    with mock.patch.object(audit, "Game", wraps=audit.Game) as game:
        audit.play_game(config, plan, root, trials=2, confidence=0.9)
    return game.call_args.kwargs["lora"]


def test_row35_and_56_the_command_plays_with_the_runs_adapters():
    (lora,) = on_ranks(1, adapters_of_the_command, "--lora.rank=4", "--lora.alpha=8")
    assert lora is not None
    assert lora.scaling == 2
    assert on_ranks(1, adapters_of_the_command) == [None]


def play_in_one_layer(fault, factors):
    """The bound that a gradient of 100 C proves which lies in one factor of the last layer."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        game = new_game((1, 1, 1), "grad_sample", 2, {}, adapters=True)
        (case,) = (case for case in game.cases if case.name == "norm_100C")
        along_PN = case.along_PN.clone()
        along_PN[0] = 0
        along_PN /= along_PN.norm()
        with_UPN = torch.stack([torch.zeros_like(along_PN), 100 * along_PN])
        terms = {"with_UPN": with_UPN, "along_PN": along_PN, "factors": factors}
        case = dataclasses.replace(case, **terms)
        return game.play(case, trials=150, confidence=0.95).mu


@pytest.mark.parametrize("fault", [None, "one layer's adapters left out"])
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.0, 1.0)], ids=["B", "A"])
def test_row35_and_56_adapters_left_out_of_the_norm_are_flagged(factors, fault):
    (bound,) = on_ranks(1, play_in_one_layer, fault, factors)
    assert bound > 0.1
    assert (bound > 1 / SIGMA) == (fault is not None)


@pytest.mark.thorough_cases("*-None", "hutch++-*")
@pytest.mark.parametrize("fault", [None, "half the noise"])
@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
def test_row35_and_67_with_estimated_norms_the_claim_is_a_mixtures(estimator, fault):
    """On gradients of rank one, whose estimates err most: above 1 / sigma, and not by much."""
    from torchtitan_dp.config import Privacy

    terms = {"norm_estimator": estimator, "projections": 16, "underestimates": "accounted"}
    names = ["norm_100C"] if fault else ["norm_C", "norm_100C", "not_a_number"]
    trials, confidence = (150, 0.95) if fault else (300, 0.999)
    arguments = (1, 1, 1), names, trials, fault, "randomized", 2, confidence, terms
    (bounds,) = on_ranks(1, play, *arguments)
    claimed = mechanism(Privacy(gradient_method="randomized", **terms))
    claim = claimed.claimed_mu(trials=trials, confidence=confidence)
    assert 1 / SIGMA < claim < 1.4 / SIGMA
    if fault is None:
        assert max(bounds.values()) <= claim
        assert bounds["norm_100C"] > 0.1
        assert bounds["not_a_number"] < 0.1
    else:
        assert bounds["norm_100C"] > claim


def estimated_matrices(method, adapters):
    """How many of the game's matrices have estimated norms."""
    from torchtitan_dp.gradients import randomized_norm

    game, found = new_game((1, 1, 1), method, 2, {}, adapters), []
    draw = randomized_norm.RandomizedNorms._draw

    def drawn(self, *arguments):
        found.append(arguments)
        return draw(self, *arguments)

    with mock.patch.object(randomized_norm.RandomizedNorms, "_draw", drawn):
        game.scores(game.cases[0], game.cases[0].with_UPN, 1)
    return len(found)


@pytest.mark.parametrize(("adapters", "matrices"), [(False, 2), (True, 4)], ids=["all", "lora"])
def test_row75_the_game_plays_with_estimates(adapters, matrices):
    assert on_ranks(1, estimated_matrices, "randomized", adapters) == [matrices]


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("projections", [1, 8, 16, 32, 33, 100])
def test_row75_the_game_plays_with_estimates_on_any_mesh(projections, estimator):
    from torchtitan_dp.audit.game import sizes
    from torchtitan_dp.config import Privacy

    terms = {"projections": projections, "norm_estimator": estimator}
    privacy = Privacy(gradient_method="randomized", **terms)
    for ranks in range(1, 257):
        for cp in (cp for cp in range(1, ranks + 1) if ranks % cp == 0):
            tokens, rows, columns = sizes(privacy, ranks=ranks, cp=cp)
            assert rows % ranks == 0
            assert rows >= 8 * ranks
            for width in (columns, rows):  # of a layer, of its factors
                room = projections * (cp * tokens + rows + width)
                assert room < min(2 * (cp * tokens) ** 2, rows * width), (ranks, cp)


def test_the_game_is_small_where_norms_are_exact():
    from torchtitan_dp.audit.game import sizes
    from torchtitan_dp.config import Privacy

    assert sizes(Privacy(gradient_method="ghost"), ranks=64, cp=8) == (1, 512, 1)


FLAGGED = [
    ("no noise", "norm_C", 50),
    ("half the noise", "norm_C", 300),
    ("no clipping", "norm_100C", 50),
    ("clipping after the sum", "neighbour", 300),
    ("bad samples kept", "not_a_number", 50),
    ("noise repeated across parameters", "twin_parameters", 50),
]
FLAGGED_ON_TWO_RANKS = [
    ("noise repeated across shards", (1, 1, 2), "twin_halves", 40),
    ("norms not reduced", (1, 1, 2), "norm_100C", 500),
    ("samples summed over dp", (1, 2, 1), "neighbour", 100),
]


@pytest.mark.parametrize("sigma, enough", [(1.0, 70), (3.0, 500)])
def test_too_few_trials_are_refused_with_a_number_that_suffices(sigma, enough):
    import torchtitan_dp.distributed  # noqa: F401

    # isort: split
    from torchtitan_dp.audit.command import check_power
    from torchtitan_dp.privacy.mechanism import PoissonGaussian

    def options(trials):
        return SimpleNamespace(instrument="game", trials=trials, confidence=0.95)

    settings = SimpleNamespace(mechanism=PoissonGaussian(sigma, 1.0))
    said = f"--trials = 30: too few to tell sigma = {sigma:.4g} from half of it; {enough} suffice"
    with pytest.raises(ValueError, match=f"^{said}$"):
        check_power(options(30), None, settings)
    check_power(options(enough), None, settings)
    settings.mechanism = settings.mechanism.with_noise(1e4)
    with pytest.raises(ValueError, match="; audit another noise "):
        check_power(options(enough), None, settings)


@pytest.mark.parametrize("fault, case, trials", FLAGGED)
def test_row35_flags(fault, case, trials):
    (bounds,) = play_one(fault, (1, 1, 1), case, trials)
    assert bounds[case] > 1 / SIGMA


@pytest.mark.thorough_cases(
    "*-300",
    "*-not_a_number-*",
    "no clipping-*",
    "no noise-*",
    "noise named by layer-*",
    "noise repeated across parameters-*",
)
@pytest.mark.parametrize(
    "fault, case, trials",
    [
        *FLAGGED,
        ("half the noise", "norm_100C", 300),
        ("no clipping", "neighbour", 50),
        ("no noise on A", "norm_C", 50),
        ("no noise on B", "norm_100C", 50),
        ("noise named by kind of factor", "twin_parameters", 50),
        ("noise named by layer", "twin_parameters", 50),
    ],
)
def test_row35_and_56_flags_in_adapters(fault, case, trials):
    (bounds,) = play_one(fault, (1, 1, 1), case, trials, adapters=True)
    assert bounds[case] > 1 / SIGMA


def play_rounds(fault, case, trials, confidence, bands):
    terms = "microbatch", 1, confidence, None, False, bands
    (bounds,) = on_ranks(1, play, (1, 1, 1), case and [case], trials, fault, *terms)
    return bounds


def test_row63_a_round_of_correlated_noise_stays_under_the_claim():
    bounds = play_rounds(None, None, 300, 0.999, 4)
    assert max(bounds.values()) <= 1 / SIGMA
    assert bounds.pop("not_a_number") < 0.1
    assert min(bounds.values()) > 0.1


@pytest.mark.parametrize(
    "fault, bands, trials",
    [("sensitivity 1", 16, 500), ("half the noise", 4, 300)],
)
def test_row63_flags_too_little_correlated_noise(fault, bands, trials):
    """Where a single step is noisy enough: later ones take its noise back."""
    assert play_rounds(fault, "norm_C", trials, 0.95, bands)["norm_C"] > 1 / SIGMA


@pytest.mark.thorough
def test_row35_and_49_flags_secure_noise_as_configured():
    """The game plays with `secure_noise` where the run does."""
    terms = ["norm_C"], 300, "half the secure noise", "microbatch", 1, 0.95, SECURE
    (bounds,) = on_ranks(1, play, (1, 1, 1), *terms)
    assert bounds["norm_C"] > 1 / SIGMA


def bounds_on_two_ranks(fault, degrees, case, trials, adapters=False):
    """Without the fault and with it."""
    clean = play_one(None, degrees, case, 40, adapters)
    bounds = play_one(fault, degrees, case, trials, adapters)
    assert bounds[0] == bounds[1]
    return clean[0][case], bounds[0][case]


@pytest.mark.thorough_cases("*-degrees1-*")
@pytest.mark.parametrize("fault, degrees, case, trials", FLAGGED_ON_TWO_RANKS)
def test_row35_flags_on_two_ranks(fault, degrees, case, trials):
    clean, planted = bounds_on_two_ranks(fault, degrees, case, trials)
    assert clean <= 1 / SIGMA < planted


@pytest.mark.thorough
@pytest.mark.parametrize("fault, degrees, case, trials", FLAGGED_ON_TWO_RANKS)
def test_row35_and_56_flags_in_adapters_on_two_ranks(fault, degrees, case, trials):
    clean, planted = bounds_on_two_ranks(fault, degrees, case, trials, adapters=True)
    assert clean <= 1 / SIGMA < planted


# Canaries.


def canary_scores(degrees, method, options, adapters=False):
    """Two noiseless steps with canaries 0..5 among records, two of them drawn in one step only."""
    from tests import build
    from torchtitan_dp.audit.canaries import Canaries, CanarySum, ScoreKeeper
    from torchtitan_dp.models.lora import LoRA
    from torchtitan_dp.optimizer import DPOptimizer

    args = build.ARGS
    if adapters:  # no mesh divides their rows
        args = dataclasses.replace(args, lora=LoRA(3, 5.0, ("wq", "w2")))
    overrides = (f"--privacy.gradient_method={method}",)
    if method == "grad_sample":
        overrides += ("--training.local_batch_size=3",)
    overrides += options
    terms = {"args": args, "max_grad_norm": 0.5, "clipped_sum_type": CanarySum}
    built = build.build(degrees, *overrides, **terms)
    sums = built.gradients.clipped_sum
    canaries = Canaries.choose(built.parameters, 6)
    included = np.array([True, False, True, True, False, True])
    from collections import deque

    drawn: deque[int | None] = deque()
    sums.plant(canaries, included, drawn)
    optimizer = torch.optim.SGD(list(built.parameters.values()), lr=0.0)
    keeper = ScoreKeeper(canaries, built.parameters, optimizer)
    dp = DPOptimizer(
        optimizer,
        built.parameters,
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=4.0,
    )
    tokens_NT, labels_NT = build.data(samples=7)
    labels_NT[:] = -100
    for units in ([None, 0, 1, 2, 3, 4, 5], [0, 1, None, 2, 3, None, None]):
        drawn.extend(units[slot] if slot >= 0 else None for slot in built.slots(np.arange(7)))
        built.accumulate(tokens_NT, labels_NT)
        assert not drawn
        dp.step(sums.take(), [(bytes(32), 1.0)])
        sums.reset()
    return (keeper.scores(degrees[0]) * 4.0 / sums.policy.bounds[0]).tolist(), canaries.names


@pytest.mark.thorough_cases("(1, 2, 2)-microbatch-*", "(2, 1, 2)-*")
@pytest.mark.parametrize(
    "options",
    [(), ("--privacy.clipping=per_layer",)],
    ids=["flat", "per_layer"],
)
@pytest.mark.parametrize("method", ["microbatch", "grad_sample"])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_an_included_canary_adds_C_at_its_place_and_an_excluded_one_nothing(
    degrees, method, options
):
    for scores, names in on_ranks(math.prod(degrees), canary_scores, degrees, method, options):
        assert scores == pytest.approx([2, 0, 2, 2, 0, 1], abs=1e-4)
        assert scores[1] == scores[4] == 0.0
        assert len(set(names)) > 2


@pytest.mark.thorough_cases("(1, 1, 1)-microbatch", "(1, 1, 2)-grad_sample", "(1, 2, 1)-*")
@pytest.mark.parametrize("method", ["microbatch", "grad_sample"])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 1)], ids=str)
def test_canaries_lie_in_adapters(degrees, method):
    for scores, names in on_ranks(math.prod(degrees), canary_scores, degrees, method, (), True):
        assert scores == pytest.approx([2, 0, 2, 2, 0, 1], abs=1e-4)
        assert scores[1] == scores[4] == 0.0
        assert all(".lora_" in name for name in names)
        assert len(set(names)) > 2


def audited(connection, argv, noise, log, cache):
    """The command, in a process of its own; of its noise only a share is there."""
    import torchtitan_dp.audit.__main__ as audit

    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {"XDG_CACHE_HOME": str(cache), "GLOO_SOCKET_IFNAME": "lo"}
    with scaled_noise(noise):
        audit.main(argv)


_TINY = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=264,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    hidden_act="silu",
)


def audited_runs(folder, *asked):
    """Audits of one tiny model, side by side: each named, with its share of the noise."""
    data = write_records(folder / "data", 10)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(_TINY))
    runs = {}
    for name, noise, overrides in asked:
        argv = [
            f"--job.config_file={CONFIG}",
            *(f"--job.dump_folder={folder / name}", f"--training.dataset_path={data}"),
            *(f"--model.hf_assets_path={folder / 'model'}", "--training.seq_len=32"),
            *("--training.global_batch_size=10", "--training.steps=2"),  # q = 1
            "--training.local_batch_size=8",
            *("--data.heldout_fraction=0", "--validation.no-enable"),
            *("--privacy.accountant=rdp", "--privacy.debug_seed=5", *overrides),
            *("--canaries=1000", f"--json={folder / name}.json", f"--plot={folder / name}.png"),
        ]
        log = folder / f"{name}.log"
        runs[name] = forks.Process(audited, argv, noise, log, folder / "cache")
    done = {}
    for name, process in runs.items():
        try:
            code = process.wait(500)
        finally:
            process.send_signal(signal.SIGKILL)
        text = (folder / f"{name}.log").read_text()
        assert code in (0, 1), text
        result = json.loads((folder / f"{name}.json").read_text())
        done[name] = SimpleNamespace(code=code, log=text, result=result, folder=folder, name=name)
    return done


CLEAN, PLANTED = (1, ["--privacy.target_epsilon=8"]), (0.01, ["--privacy.target_epsilon=3"])


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """Two audits: clean, and with a hundredth of the noise."""
    return audited_runs(tmp_path_factory.mktemp("audit"), ("clean", *CLEAN), ("planted", *PLANTED))


@pytest.mark.thorough
def test_canaries_in_adapters_of_a_run(tmp_path):
    """A run with [lora] is audited as any: it stays under its claim, and little noise is found."""
    lora = ["--lora.rank=8"]
    of_adapters = [(noise, options + lora) for noise, options in (CLEAN, PLANTED)]
    asked = zip(("clean", "planted"), *zip(*of_adapters, strict=True), strict=True)
    clean, planted = audited_runs(tmp_path, *asked).values()
    assert (clean.code, planted.code) == (0, 1), clean.log + planted.log
    least, claimed = (clean.result[f"epsilon_{key}"] for key in ("lower_bound", "claimed"))
    assert claimed / 4 <= least < claimed <= 8
    assert planted.result["epsilon_claimed"] <= 3 < planted.result["epsilon_lower_bound"]
    told = json.loads((tmp_path / "clean_audit" / "privacy.json").read_text())
    assert told["trained"].startswith("LoRA of rank 8")


def test_a_run_that_publishes_held_out_losses_is_audited_without_them(tmp_path):
    """Or they would be planned, and asked of a validator that an audit has not."""
    from tests import build
    from torchtitan_dp.audit.__main__ import prepare_run
    from torchtitan_dp.checkpoint.terms import choose_losses

    terms = "--validation.publish_epsilon=1", "--validation.publish_delta=1e-6"
    config = build.config("--validation.enable", "--data.heldout_fraction=0.3", *terms)
    assert choose_losses(config, None) is not None
    prepare_run(config, str(tmp_path))
    assert choose_losses(config, None) is None


@pytest.mark.slow
def test_canaries_the_clean_build_stays_under_its_claim_with_power(audits):
    clean = audits["clean"]
    assert clean.code == 0, clean.log
    result = clean.result
    assert 7.9 < result["epsilon_claimed"] <= 8
    assert result["epsilon_claimed"] / 4 <= result["epsilon_lower_bound"]
    assert result["epsilon_lower_bound"] < result["epsilon_claimed"]
    assert (result["confidence"], result["canaries"], result["guesses"]) == (0.95, 1000, 200)
    assert 400 < result["included"] < 600
    assert "proves nothing" in clean.log
    assert "no fault found" in clean.log


@pytest.mark.slow
def test_canaries_a_hundredth_of_the_noise_exceeds_a_claim_of_3(audits):
    planted = audits["planted"]
    assert planted.code == 1, planted.log
    assert planted.result["epsilon_claimed"] <= 3 < planted.result["epsilon_lower_bound"]
    assert planted.result["correct"] == planted.result["guesses"] == 200
    assert "FAULT" in planted.log


@pytest.mark.slow
def test_an_audited_run_is_not_private_and_apart(audits):
    for run in audits.values():
        folder = run.folder / f"{run.name}_audit"
        told = json.loads((folder / "privacy.json").read_text())
        assert told["private"] is False
        assert told["epsilon"] is None
        assert "audited: 1000 canaries were trained on" in told["caveats"]
        assert not (run.folder / run.name).exists()
        guesses = json.loads((folder / "audit_guesses.json").read_text())
        assert set(guesses) == {"scores", "guesses"}  # written before the coins were looked at
        assert np.bincount(np.array(guesses["guesses"]) + 1).tolist() == [100, 800, 100]
        assert (run.folder / f"{run.name}.png").stat().st_size > 10_000
        assert json.loads((folder / "audit.json").read_text()) == run.result


@pytest.mark.parametrize(
    "options, names",
    [
        (["--privacy.no-enable"], "privacy.enable"),
        (["--privacy.target_epsilon=None", "--privacy.noise_multiplier=0"], "noise_multiplier"),
        (["--canaries=0"], "--canaries = 0"),
        (["--privacy.gradient_method=ghost"], "privacy.gradient_method = 'ghost'"),
        (["--guesses=1.5"], "--guesses = 1.5"),
        (["--canaries=10000000"], "--canaries = 10000000"),
        (["--instrument=game", "--trials=20"], "--trials = 20"),
        (["--confidence=1"], "--confidence = 1"),
        (["--trials=9"], "--trials = 9"),
        (["--instrument=game", "--folder=x"], "--folder = x"),
        (["--folder={used}"], "--folder"),
        (["--training.stepz=3"], "stepz"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, options, names):
    import torchtitan_dp.audit.__main__ as audit

    data = write_records(tmp_path / "data")
    used = tmp_path / "used"
    used.mkdir()
    (used / "steps_executed.log").write_text("1 1.0 0.1 a\n")
    command = [
        *(f"--job.config_file={CONFIG}", f"--training.dataset_path={data}"),
        *("--data.heldout_fraction=0", "--validation.no-enable", "--privacy.accountant=rdp"),
        *(f"--job.dump_folder={tmp_path / 'out'}", "--training.global_batch_size=3"),
        *(option.format(used=used) for option in options),
    ]
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        with pytest.raises(SystemExit) as stop:
            audit.main(command)
    finally:
        os.umask(umask)
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    message = [line for line in said if not line.startswith("not private: tokenizing ")]
    assert len(message) == 1, message
    assert names in message[0]
