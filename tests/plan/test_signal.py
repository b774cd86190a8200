"""Signal and noise: the formulas, what is recommended, and what the shipped configurations get."""

import functools
import json
import math
import re
import sys

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.processes.runs import ROOT, arguments, with_sigma, write_records
from torchtitan_dp.plan.signal import DROWNS, Row, rows_of
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Mechanism

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("own_cache")

FULL_1B = 1_235_814_400
LARGE = sorted((ROOT / "train_configs").glob("*_*b_*.toml"))


@pytest.fixture
def planned(plan_tiny):
    """Plans a tiny run on one rank: what it says, and its JSON."""
    return functools.partial(plan_tiny, 1)


def promise(units, delta):
    """The sigma of a batch and steps at epsilon = 8, and the units."""

    def sigma_of(batch, steps):
        mechanism, terms = Mechanism(1.0, batch / units), {"target_epsilon": 8.0, "delta": delta}
        return accounting.noise_for(mechanism, steps, accountant="pld", **terms)

    return sigma_of, units


TEN_THOUSAND = promise(10_000, 1e-6)


def test_noise_of_published_runs():
    """N = 10,000, epsilon = 8, delta = 1e-6, of 1B and its adapters; and GPT-2 on E2E, by the
    settings in the code of Li et al., known to be good."""
    for batch, steps, in_step, over_run in ((64, 200, 267, 18.9), (1024, 12, 23.6, 6.8)):
        sigma = TEN_THOUSAND[0](batch, steps)
        full = Mechanism(sigma, batch / 10_000).noise_norms(FULL_1B, batch, steps)
        assert full == (pytest.approx(in_step, rel=0.015), pytest.approx(over_run, rel=0.01))
    sigma = promise(42_061, 8e-6)[0](1024, 411)
    gpt2 = Mechanism(sigma, 1024 / 42_061).noise_norms(124_000_000, 1024, 411)
    assert gpt2 == pytest.approx((7.4, 0.37), rel=0.01)
    assert gpt2[1] < DROWNS


def formula(units, mu=1.6):
    """As accountants have it, roughly, without their seconds: a noise that one step needs, and one
    that grows with all that is drawn."""

    def sigma_of(batch, steps):
        rate = batch / units
        return math.hypot(0.45 * (rate < 1), math.sqrt(steps) * rate / mu)

    return sigma_of, units


def rows(target, batch, steps, scale=1.0):
    sigma_of, units = target
    asked = Row(batch, steps, batch / units, scale * sigma_of(batch, steps))
    return asked, *rows_of(sigma_of, asked, units)


@pytest.mark.parametrize(
    ("target", "batch", "steps", "best"),
    [
        (TEN_THOUSAND, 64, 200, (512, 25)),  # as many steps as must be
        (formula(500, 30.0), 64, 800, (128, 400)),  # q
        (formula(5_000), 64, 6_400, (64, 6_400)),  # not worth it
        *((formula(10_000), 2**k, 12_800 >> k, (512, 25)) for k in (5, 6, 8, 9)),  # all the same
        (formula(10_000), 1024, 12, (512, 24)),  # too few were asked for
        (formula(100), 75, 60, (38, 118)),  # too many of the units
        (formula(100), 3, 10, (1, 30)),
        (formula(100), 3, 4, None),
    ],
)
def test_what_is_recommended(target, batch, steps, best):
    """Also to who follows a recommendation: the same."""
    asked, found, taken = rows(target, batch, steps)
    assert best == (taken and (taken.global_batch_size, taken.steps))
    assert asked in found
    assert taken is None or taken in found
    noises = [row.over_run(FULL_1B) for row in found]
    assert noises == sorted(noises, reverse=True)  # what bounds the batch is not the noise
    for row in found:
        assert abs(row.global_batch_size * row.steps - batch * steps) <= row.global_batch_size / 2
        assert row.sample_rate == pytest.approx(row.global_batch_size / target[1])


def test_estimated_norms_scale_the_other_rows():
    """Their own calibration takes seconds."""
    _, exact, _ = rows(formula(1_702), 24, 80)
    _, found, _ = rows(formula(1_702), 24, 80, scale=1.098)
    assert len(found) > 1
    for row, one in zip(found, exact, strict=True):
        assert row.noise_multiplier == pytest.approx(1.098 * one.noise_multiplier)


def test_the_plan_says_how_large_the_noise_is(planned):
    """Noise that drowns is one line of warning."""
    said, content = planned(*with_sigma(0.5))
    trained = content["trained_parameters"]
    in_step = 0.5 * math.sqrt(trained) / 3
    assert content["signal"]["noise_in_step"] == pytest.approx(in_step)
    assert content["signal"]["noise_over_run"] == pytest.approx(in_step / 2)  # 4 steps
    assert content["recommendation"] is None
    assert (
        f"noise: its norm is {in_step:.3g} C in a step and {in_step / 2:.3g} C averaged over the "
        f"run, over {trained:,} trained values; the gradient of one record is clipped to a norm of "
        "C\n" in said
    )
    assert content["signal"]["drowns"] is True
    (line,) = (line for line in said.splitlines() if line.startswith("warning: averaged over"))
    assert "--recommend" in line
    said, content = planned(*with_sigma(0.01))
    assert content["signal"]["drowns"] is False
    assert "the noise is still" not in said
    assert "the noise is still" not in planned(*with_sigma(0))[0]
    adapters = ("--lora.rank=8", "--privacy.clipping=per_layer")  # they count alone
    said, content = planned(*with_sigma(0.5), *adapters)
    assert content["signal"]["noise_in_step"] == pytest.approx(0.5 * math.sqrt(116_736) / 3)
    assert "a norm of C, reached with every group of layers at its bound" in said


@pytest.mark.slow
def test_recommend(planned):
    sizes = ("--training.global_batch_size=2", "--training.steps=400")
    said, content = planned(*sizes, "--recommend")
    advice = content["recommendation"]
    asked, *more = advice["rows"][1:]
    assert (asked["global_batch_size"], asked["steps"]) == (2, 400)
    assert asked["noise_multiplier"] == content["noise_multiplier"]
    assert asked["noise_over_run"] == pytest.approx(content["signal"]["noise_over_run"])
    best = (advice["global_batch_size"], advice["steps"])
    assert best in [(row["global_batch_size"], row["steps"]) for row in (asked, *more)]
    (line,) = (line for line in said.splitlines() if line.startswith("recommended: "))
    assert line == advice["reason"]
    assert f"training.global_batch_size = {best[0]}, training.steps = {best[1]}" in line
    assert "heuristics" in line


@pytest.mark.slow
def test_a_number_of_records_that_is_private_decides_nothing(tmp_path, capsys):
    """With `add_remove` the recommendation takes it from the public rate."""
    said = []
    for count in (24, 25):
        data = write_records(tmp_path / f"data{count}", count)
        public = ("--privacy.sample_rate=0.1", "--privacy.delta=1e-3", "--training.steps=100")
        command = arguments(tmp_path / "out", data, *public, "--recommend", "--no_memory")
        plan.main([*command, "--world_size=1", "--json=-"])
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["recommendation"] == said[1]["recommendation"]
    assert said[0]["recommendation"]["rows"][1]["sample_rate"] == pytest.approx(0.1)
    advice = said[0]["recommendation"]  # to follow it takes the rate as well
    assert f", privacy.sample_rate = {advice['sample_rate']:.6g}" in advice["reason"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (with_sigma(1), "privacy.noise_multiplier = 1.0: .*target_epsilon"),
        (("--privacy.no-enable",), "privacy.enable = false: "),
        ((), "job.dump_folder = .*; name another folder"),
    ],
)
def test_what_recommend_needs(tmp_path, planned, capsys, overrides, says):
    """Also a run that has not begun."""
    if not overrides:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "steps_executed.log").write_text("1\n")
    with pytest.raises(SystemExit) as stop:
        planned(*overrides, "--recommend")
    assert stop.value.code == 2
    assert re.fullmatch(f"error: --recommend with {says}.*\n", capsys.readouterr().err)


def settings(toml):
    """All that the plan's noise depends on."""
    keys = tomllib.loads(toml.read_text())
    training, model = keys["training"], keys["model"]["flavor"]
    rank = keys.get("lora", {}).get("rank", 0)
    return model, rank, training["global_batch_size"], training["steps"]


DIFFERENT = sorted({settings(toml): toml for toml in reversed(LARGE)}.values())


@pytest.mark.slow
@pytest.mark.parametrize("toml", DIFFERENT, ids=lambda path: path.stem)
def test_shipped_settings_are_what_would_be_recommended(toml, tmp_path, capsys):
    """Of their compute, for the records that they name, which are too few to train all weights."""
    command = [f"--job.config_file={toml}", f"--job.dump_folder={tmp_path / 'out'}"]
    plan.main([*command, "--privacy.accountant=rdp", "--recommend", "--json=-", "--no_memory"])
    content = json.loads(capsys.readouterr().out)
    advice, (_, rank, *asked) = content["recommendation"], settings(toml)
    assert [advice["global_batch_size"], advice["steps"]] == asked
    assert content["signal"]["drowns"] is (rank == 0)
