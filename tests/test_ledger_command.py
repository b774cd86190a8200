"""Segments, initial weights and `python -m torchtitan_dp.ledger`, on real runs (hazard row 45)."""

import dataclasses
import json
import shutil

import pytest

from tests.launch import arguments, privacy, train, with_sigma, write_records
from torchtitan_dp.cli import load_config
from torchtitan_dp.ledger import Account, ExecutedSteps, Ledger, write_fingerprint
from torchtitan_dp.ledger.__main__ import main
from torchtitan_dp.ledger.initial import PUBLIC, start_from
from torchtitan_dp.ledger.terms import earlier_ledger, make_plan
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Segment

SIGMA, DELTA = 1.0, 1e-3
RATE = 3 / 24


def spends(*steps_by_sigma):
    segments = [Segment(sigma, RATE, steps) for sigma, steps in steps_by_sigma]
    return accounting.compose(segments, delta=DELTA, accountant="rdp")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("ledger") / "data")


@pytest.fixture(scope="module")
def first(data):
    """A run of four steps, and its folder."""
    out = data.parent / "first"
    train(arguments(out, data, *with_sigma(SIGMA)), log=data.parent / "first.log")
    return out


@pytest.fixture
def copy(first, tmp_path):
    shutil.copytree(first, tmp_path / "out")
    return tmp_path / "out"


def run(*arguments_):
    """Exit code and JSON of the command."""
    path = str(arguments_[0]) + ".json"
    return main([*map(str, arguments_), "--json", path]), json.loads(open(path).read())


def test_a_run_that_holds_together(first, capsys):
    code, told = run(first)
    assert code == 0
    assert told["runs"][0]["verified"] is True
    assert told["runs"][0]["epsilon"] == pytest.approx(spends((SIGMA, 4)))
    assert told["total"]["epsilon"] == told["runs"][0]["epsilon_executed"]
    assert privacy(first)["epsilon"] == pytest.approx(spends((SIGMA, 4)))
    assert "together: epsilon = " in capsys.readouterr().err


def edit(folder, **changes):
    path = folder / "privacy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda f: edit(f, epsilon=0.5), "epsilon = 0.5, but its steps spend"),
        (lambda f: edit(f, epsilon_executed=0.5), "epsilon_executed = 0.5"),
        (lambda f: edit(f, noise_multiplier=9.0), "noise_multiplier is not that of its last"),
        (lambda f: edit(f, run="another"), "is of another run"),
        (lambda f: (f / "steps_executed.log").write_text("1 1.0 0.125\n"), "fewer than"),
        (lambda f: (f / "checkpoint/step-4").rename(f / "checkpoint/step-5"), "counts 4 steps"),
    ],
)
def test_files_that_contradict_each_other(copy, change, fault):
    change(copy)
    code, told = run(copy)
    assert code == 1
    assert any(fault in line for line in told["runs"][0]["faults"]), told["runs"][0]["faults"]


def test_a_forgotten_mark_is_found(copy):
    text = json.loads((copy / "privacy.json").read_text())
    kept = make_plan_of(copy)
    kept.mark_not_private("seen")
    Account(kept, ExecutedSteps(str(copy)), 4).publish(str(copy))
    code, told = run(copy)
    assert (code, told["total"]["epsilon"]) == (0, None)  # said of the folder: nothing is claimed
    edit(copy, **{key: text[key] for key in ("private", "epsilon", "epsilon_executed")})
    assert run(copy)[0] == 0  # the checkpoints say private too: only an edit could tell


def make_plan_of(folder):
    return dataclasses.replace(earlier_ledger(str(folder)))


def test_steps_lost_after_the_last_writing_are_counted(copy):
    with open(copy / "steps_executed.log", "a") as file:
        file.write("5 0.5 0.125\n")
    code, told = run(copy)
    assert code == 0
    assert told["runs"][0]["epsilon_executed"] == pytest.approx(spends((SIGMA, 4), (0.5, 1)))
    assert "1 steps were begun after" in told["runs"][0]["notes"][0]


def test_runs_add_up_and_only_on_the_same_records(first, copy, tmp_path):
    edit(copy, run="b")
    for path in (copy / "checkpoint").iterdir():
        shutil.rmtree(path)
    code, told = run(first, copy, "--plot", tmp_path / "plot.png")
    assert code == 0
    assert told["total"]["epsilon"] == pytest.approx(spends((SIGMA, 8)))
    assert (tmp_path / "plot.png").stat().st_size > 1000
    write_fingerprint(str(copy), "f" * 64)
    with pytest.raises(SystemExit) as stop:
        run(first, copy)
    assert stop.value.code == 2


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path)])
    assert stop.value.code == 2
    assert "holds no privacy.json" in capsys.readouterr().err


def test_hazard_45_weights_of_a_run_on_the_same_records_spend_on(first, data, tmp_path):
    out = tmp_path / "second"
    load = f"--checkpoint.initial_load_path={first}/checkpoint/step-4"
    train(arguments(out, data, *with_sigma(2.0), load, "--training.steps=2"), log=tmp_path / "log")
    spent = privacy(out)
    assert spent["steps"] == 2
    assert spent["epsilon"] == pytest.approx(spends((SIGMA, 4), (2.0, 2)))
    assert any("whose steps are included" in caveat for caveat in spent["caveats"])
    assert run(out)[1]["total"]["epsilon"] == pytest.approx(spends((SIGMA, 4), (2.0, 2)))
    both = run(out, first)[1]["total"]  # the ancestor is one of the two: counted once
    assert both["epsilon"] == pytest.approx(spends((SIGMA, 4), (2.0, 2)))
    assert both["steps_executed"] == 6


def test_a_planned_segment(copy, data, tmp_path):
    changed = [*with_sigma(2.0), "--training.steps=6"]
    command = arguments(copy, data, *changed)
    with pytest.raises(ValueError, match=r"privacy\.new_segment"):
        plan_of(command, copy)
    train([*command, "--privacy.new_segment=planned"], log=tmp_path / "log")
    spent = privacy(copy)
    assert [segment["steps"] for segment in spent["segments"]] == [4, 2]
    assert (spent["steps"], spent["steps_executed"]) == (6, 6)
    assert spent["epsilon"] == pytest.approx(spends((SIGMA, 4), (2.0, 2)))
    assert spent["epsilon_executed"] == pytest.approx(spent["epsilon"])
    assert any("fixed before" in caveat for caveat in spent["caveats"])
    assert run(copy)[0] == 0


def plan_of(command, folder):
    return make_plan(load_config(command, 2), 24, earlier_ledger(str(folder)), "")


def test_an_adaptive_segment_stays_within_the_budget_of_the_first_start(copy, data):
    budget = privacy(copy)["budget"]["epsilon"]
    assert budget >= spends((SIGMA, 4)) * (1 - 1e-9)
    command = arguments(copy, data, "--privacy.new_segment=adaptive", "--training.steps=5")
    with pytest.raises(ValueError, match=r"would spend .* more than the .* fixed at the first"):
        plan_of([*command, *with_sigma(2.0)], copy)
    with pytest.raises(ValueError, match=r"set privacy\.noise_multiplier instead"):
        plan_of(command, copy)
    before = earlier_ledger(str(copy))
    before.steps = 2  # stopped half-way, and gone on with more noise
    config = load_config([*command, *with_sigma(2.0)], 2)
    plan = make_plan(config, 24, before, "")
    assert plan.ledger.adaptive
    assert spends((SIGMA, 2), (2.0, 3)) <= plan.epsilon <= budget


def test_the_target_leaves_what_was_not_spent(copy, data):
    """`new_segment` with a target: the coming steps get the noise that keeps the sum within it."""
    command = arguments(
        copy,
        data,
        "--privacy.new_segment=planned",
        "--privacy.target_epsilon=9",
        "--training.steps=8",
    )
    plan = plan_of(command, copy)
    assert 9 * 0.99 <= plan.epsilon <= 9
    segments = [s.mechanism() for s in plan.ledger.segments(8)]
    assert [s.steps for s in segments] == [4, 4]
    assert plan.epsilon == accounting.compose(segments, delta=DELTA, accountant="rdp")


# What initial weights bring along.


def starting_from(path, *overrides):
    config = load_config(
        arguments(
            path / "new",
            path,
            *with_sigma(1.0),
            f"--checkpoint.initial_load_path={path}",
            *overrides,
        ),
        2,
    )
    ledger = Ledger(make_plan(load_config(arguments(path / "x", path), 2), 24, None, "").settings)
    start_from(ledger, config, "mine")
    return ledger


def test_hazard_45_weights_without_a_ledger_must_be_said_to_be_public(tmp_path):
    with pytest.raises(ValueError, match=r"^privacy\.initial_weights_public = false: "):
        starting_from(tmp_path)
    kept = starting_from(tmp_path, "--privacy.initial_weights_public")
    assert (kept.private, kept.caveats) == (True, [PUBLIC])


def publish(folder, kept):
    (folder / "hf").mkdir()
    Account(kept, ExecutedSteps(str(folder)), 10).publish(str(folder))
    return folder / "hf"


def test_hazard_45_not_private_sticks_to_exported_weights(tmp_path, copy):
    kept = make_plan_of(copy)
    kept.mark_not_private("a seed")
    later = starting_from(publish(tmp_path, kept), "--privacy.initial_weights_public")
    assert later.private is False
    assert "of the initial weights: a seed" in later.caveats


def test_weights_from_other_records_are_a_caveat_and_another_unit_is_refused(tmp_path, copy):
    kept = make_plan_of(copy)
    hf = publish(tmp_path, kept)
    write_fingerprint(str(tmp_path), "theirs")
    later = starting_from(hf)
    assert later.ancestors == []
    assert any("on other records" in caveat for caveat in later.caveats)
    write_fingerprint(str(tmp_path), "mine")
    assert [ancestor.run for ancestor in starting_from(hf).ancestors] == [kept.run]
    kept.settings = dataclasses.replace(kept.settings, privacy_unit="patient")
    shutil.rmtree(hf)
    with pytest.raises(ValueError, match="no epsilon covers both"):
        starting_from(publish(tmp_path, kept))
