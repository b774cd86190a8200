"""The plan: what a run will spend, said before it starts; hazard rows 15, 23, 25 and 38."""

import dataclasses
import json
import math
import os
import re
import sys

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.accounts import begun, epsilon, publish, with_terms
from tests.processes.runs import ROOT, arguments, with_sigma, write_records
from torchtitan_dp.checkpoint.start import Start, plan_start
from torchtitan_dp.config.load import load_config
from torchtitan_dp.ledger.schema import released, write_published

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("own_cache")

TOMLS = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.fixture
def planned(plan_tiny):
    """Plans a tiny run on two ranks: its JSON."""
    return lambda *overrides: plan_tiny(2, *overrides)[1]


@pytest.fixture
def said(plan_tiny):
    """Plans it: what is said."""
    return lambda *overrides: plan_tiny(2, *overrides)[0]


def test_keys_of_the_json(tmp_path, planned, monkeypatch):
    content = planned()
    assert {"epsilon", "noise_multiplier", "sample_rate", "steps", "world_size"} <= set(content)
    assert (content["steps"], content["world_size"], content["sample_rate"]) == (4, 2, 3 / 24)
    assert content["private"] is True
    assert content["privacy_unit"] == "record"
    assert content["tokens_per_step"] == 2 * 16 * content["microbatches_per_step"]  # T = 32, cp = 2
    held_out = planned("--data.heldout_fraction=0.3")  # these are no part of q
    assert 3 / 24 < held_out["sample_rate"] <= 1

    monkeypatch.setenv("HOME", str(tmp_path))
    command = arguments(tmp_path / "out", tmp_path / "data")
    plan.main([*command, "--world_size=2", "--json=~/plan.json", "--no_memory"])
    assert json.loads((tmp_path / "plan.json").read_text()) == content
    assert not (tmp_path / "out").exists()


def test_a_number_of_records_that_is_private_is_not_told(tmp_path, capsys):
    """With `add_remove` one unit more or less must not show in what the plan calls public."""
    said = []
    for count in (24, 25):
        data = write_records(tmp_path / f"data{count}", count)
        rate = ("--privacy.sample_rate=0.3", "--privacy.delta=0.05", *with_sigma(1))
        command = arguments(tmp_path / "out", data, *rate)
        plan.main([*command, "--world_size=1", "--json=-", "--no_memory"])
        output = capsys.readouterr()
        lines = [re.split(r"not private\)?: ", line)[0] for line in output.err.splitlines()]
        said.append((output.out, lines))
    assert said[0] == said[1]
    assert "must be below 1 / number of training records" in output.err


@pytest.mark.thorough_cases("0.5-*")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_hazard_38_target_is_not_overshot(planned, accountant, target):
    content = planned(f"--privacy.target_epsilon={target}", f"--privacy.accountant={accountant}")
    assert 0.999 * target <= content["epsilon"] <= target
    spent = epsilon(
        noise_multiplier=content["noise_multiplier"],
        sample_rate=content["sample_rate"],
        steps=content["steps"],
        delta=content["delta"],
        accountant=accountant,
    )
    assert spent == content["epsilon"]


def test_an_account_is_left_by_steps_alone(tmp_path, planned, capsys):
    """A plan may run often: only a step fixes the terms, which need `privacy.json` to be known."""
    planned("--privacy.delta=1e-3")
    planned("--privacy.delta=1e-4")
    steps = tmp_path / "out" / "steps_executed.log"
    assert not (tmp_path / "out" / "privacy.json").exists()
    assert not steps.exists()
    steps.parent.mkdir(exist_ok=True)
    steps.write_text("1\n")
    with pytest.raises(SystemExit) as stop:
        planned()
    assert stop.value.code == 2
    assert "privacy.json" in capsys.readouterr().err


def test_hazard_15_the_source_of_q_is_named(planned):
    by_count = planned()
    assert by_count["sample_rate_source"].startswith("training.global_batch_size / number of")
    assert by_count["neighbouring_relation"] == "zero_out"  # hazard 23: the count is public
    given = planned("--privacy.sample_rate=0.2")
    assert given["sample_rate_source"] == "privacy.sample_rate"
    assert given["sample_rate"] == 0.2
    assert given["neighbouring_relation"] == "add_remove"
    assert given["expected_batch_size"] == 3  # the divisor is the key's, not a count's


def test_what_is_said(said):
    lines = said("--training.feed_forward_chunk=7")
    assert "q = 0.125 from training.global_batch_size / number of training records" in lines
    for words in ("neighbours: zero_out", "unit: one record", "blocks in tiles of 7 tokens"):
        assert words in lines
    assert "tiles" not in said()


def test_epsilon_follows_from_given_noise_and_is_null_where_a_run_is_not_private(planned):
    two, one = (planned(*with_sigma(sigma)) for sigma in (2, 1))
    assert two["noise_multiplier"] == 2
    assert 0 < two["epsilon"] < one["epsilon"] < math.inf
    for overrides in (("--privacy.debug_seed=1",), with_sigma(0)):
        content = planned(*overrides)
        assert content["epsilon"] is None
        assert content["private"] is False


def test_without_privacy_nothing_is_asked(tmp_path, capsys):
    data = write_records(tmp_path / "data")
    command = arguments(tmp_path / "out", data, "--privacy.no-enable", "--privacy.delta=None")
    plan.main([*command, "--world_size=2", "--json=-"])
    said = capsys.readouterr()
    assert "plan: without privacy (privacy.enable = false)\n" in said.err
    assert "nothing more is predicted without privacy" in said.err
    assert said.out == ""


def test_hazard_15_and_31_terms_are_the_ledgers_once_a_step_was_begun(tmp_path, planned):
    """sigma is read, never recomputed: an accountant that changed would move it."""
    first = planned()
    config = load_config(arguments(tmp_path / "out", tmp_path / "data"), 2)
    kept = plan_start(config, 24, Start(), None)
    sigma = 1.001 * kept.settings.mechanism.noise_multiplier  # as another version may find it
    settings = with_terms(kept.settings, noise_multiplier=sigma)
    out, ledger = str(tmp_path / "out"), dataclasses.replace(kept.ledger, settings=settings)
    publish(ledger, out)
    assert planned()["noise_multiplier"] == first["noise_multiplier"]  # no step was begun
    begun(ledger, out, 1)
    assert planned()["noise_multiplier"] == sigma
    assert planned("--training.steps=3")["noise_multiplier"] == sigma


def keys(section, prefix=""):
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        is_section = dataclasses.is_dataclass(value)
        yield from keys(value, f"{prefix}{f.name}.") if is_section else [prefix + f.name]


@pytest.mark.slow
@pytest.mark.parametrize("toml", TOMLS, ids=lambda path: path.stem)
def test_hazard_25_every_config_plans_and_has_no_rule_on_private_values(toml, tmp_path, capsys):
    degrees = tomllib.loads(toml.read_text()).get("parallelism", {})
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    world_size = max(2, math.prod(max(degrees.get(f"{name}_degree", 1), 1) for name in names))
    command = [
        f"--job.config_file={toml}",
        f"--job.dump_folder={tmp_path / 'out'}",
        "--training.dataset=text",
        "--training.dataset_path=python-stdlib",
        "--model.hf_assets_path=",
        "--checkpoint.no-initial_load_in_hf",  # no weights are at hand
    ]
    plan.main([*command, f"--world_size={world_size}"])
    assert "plan: epsilon = " in capsys.readouterr().out
    config = load_config(command, world_size)
    # The learning rate follows the step alone: these are TorchTitan's schedules, and all keys of
    # the sections from which a rule on the loss could come. A new key must be judged here.
    assert config.lr_scheduler.decay_type in ("linear", "sqrt", "cosine")
    assert set(keys(config.lr_scheduler)) == {
        *("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor", "total_steps")
    }
    assert {key for key in keys(config.validation) if not key.startswith("dataloader.")} == {
        *("enable", "dataset", "dataset_path", "local_batch_size", "seq_len", "freq", "steps"),
        # Noised, with an epsilon of its own: a rule on it could be counted.
        *("publish_epsilon", "publish_clip", "publish_delta"),
        "reference_loss",  # words at the end of a run
    }
    suspects = ("early_stop", "patience", "plateau", "best", "threshold", "adaptive")
    recomputation = {"activation_checkpoint.early_stop"}  # of a block, not of training
    found = {key for key in keys(config) if any(word in key for word in suspects)}
    assert found - recomputation == set()


def test_steps_that_a_crash_lost_are_said_with_what_keeps_the_target(tmp_path, capsys):
    """Or the release would be the first to state an epsilon above the one that was asked for."""
    command = [*arguments(tmp_path / "out", write_records(tmp_path / "data")), "--world_size=2"]
    ledger = plan_start(load_config(command[:-1], 2), 24, Start(), None).ledger
    os.makedirs(tmp_path / "out")
    publish(ledger, tmp_path / "out")
    begun(ledger, tmp_path / "out", 1, loses=2)
    plan.main(command)
    said = "".join(capsys.readouterr())
    assert "counted as 2: a release will state epsilon = " in said
    assert float(re.search(r"will state epsilon = ([0-9.]+)", said)[1]) > 8
    assert "above privacy.target_epsilon = 8, since " in said
    another = re.search(r"another crash counts \d+ more .* epsilon = ([0-9.]+) \(", said)
    assert float(another[1]) > float(re.search(r"plan: epsilon = ([0-9.]+)", said)[1]) > 8


def test_a_release_is_no_folder_to_train_in(tmp_path, capsys):
    command = [*arguments(tmp_path / "out", write_records(tmp_path / "data")), "--world_size=2"]
    ledger = plan_start(load_config(command[:-1], 2), 24, Start(), None).ledger
    os.makedirs(tmp_path / "out")
    write_published(str(tmp_path / "out"), released(ledger, 8.0, 8.0))
    with pytest.raises(SystemExit):
        plan.main(command)
    assert "out': it is a release; name another folder" in capsys.readouterr().err
