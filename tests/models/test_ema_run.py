"""Real runs with an average of weights: what it is made of, resumed, exported and released."""

import itertools
import re

import pytest
import torch

from tests.models.hugging_face import PLAIN, checkpoint_logits, transformers_logits, write_llama
from tests.processes.runs import arguments, load, privacy, train, with_sigma, write_records
from torchtitan_dp.checkpoint.folder import average_name
from torchtitan_dp.release.__main__ import main as release

STEPS = 4
SHARDED = "--parallelism.data_parallel_shard_degree=2"
HELD_OUT = ("--data.heldout_fraction=0.3", "--validation.enable", "--validation.steps=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("ema_run")
    write_llama(place / "given", tied=True, rope=PLAIN, eps=1e-6)
    write_records(place / "data")
    return place


def command(place, out, *overrides):
    return arguments(
        out,
        place / "data",
        f"--model.hf_assets_path={place / 'given'}",
        "--checkpoint.initial_load_in_hf",
        "--privacy.initial_weights_public",
        "--checkpoint.interval=1",
        *with_sigma(1),
        "--ema.enable",
        *overrides,
    )


@pytest.fixture(scope="module")
def finished(place):
    """A private run on two shards, from given weights; not to be changed."""
    out = place / "out"
    options = (SHARDED, *HELD_OUT, "--validation.freq=4", "--checkpoint.last_save_in_hf")
    train(command(place, out, *options), log=place / "log", world_size=2)
    return out


def state(run, step):
    return load(run / "checkpoint" / f"step-{step}")


def assert_same(found, expected):
    """Bit by bit, all tensors: weights, moments and averages."""
    for name, value in expected.items():
        assert not torch.is_tensor(value) or torch.equal(found[name], value), name


def averages(saved):
    """What a checkpoint holds of averages, by the parameter's name."""
    return {
        name.removeprefix(average_name("")): value
        for name, value in saved.items()
        if name.startswith(average_name(""))
    }


def followed(before, after, t):
    """The averages of an update by the formula: of those before, and of the weights after."""
    d = min(0.9999, (1 + t) / (10 + t))
    return {name: old.lerp(after[name], 1 - d) for name, old in averages(before).items()}


def test_row76_each_average_follows_from_released_weights_alone(finished):
    """Whoever has all checkpoints' weights can compute it: there is nothing else in it."""
    saved = [state(finished, step) for step in range(1, STEPS + 1)]
    for t, (before, after) in enumerate(itertools.pairwise(saved), start=1):
        trained = {name for name in weights_of(after) if name != "model.lm_head.weight"}  # tied
        names = {average_name(name) for name in trained} | {"ema.updates"}
        assert {name for name in after if name.startswith("ema.")} == names
        assert_same(averages(after), followed(before, after, t))
        for name, found in averages(after).items():
            assert not torch.equal(found, after[name]), name
    assert [one["ema.updates"] for one in saved] == [1, 2, 3, 4]


def weights_of(saved):
    return {k: v for k, v in saved.items() if k.startswith("model.")}


def test_validation_tells_both_losses(place, finished):
    line = r"not private: held-out loss: ([\d.]+), averaged weights: ([\d.]+)"
    said = re.findall(line, (place / "log").read_text())
    assert len(set(said)) == 2  # at steps 1 and 4, told by both ranks
    assert any(last != average for last, average in said)  # by chance, one may agree in all digits


def logits(run, average):
    """Ours, of the last checkpoint."""
    saved = state(run, STEPS)
    held = weights_of(saved) | (averages(saved) if average else {})
    if average and "model.lm_head.weight" in held:
        held["model.lm_head.weight"] = held["model.model.embed_tokens.weight"]
    return checkpoint_logits(run, held)


@pytest.mark.parametrize(("option", "average"), [((), True), (("--no-ema",), False)])
def test_a_release_is_of_the_average_unless_told_otherwise(finished, tmp_path, option, average):
    """And so is the folder at the end of a run."""
    release([str(finished), str(tmp_path / "model"), *option])
    found = transformers_logits(tmp_path / "model")
    assert (found - logits(finished, average)).abs().max() < 1e-4
    assert (found - logits(finished, not average)).abs().max() > 0.01
    assert torch.equal(found, transformers_logits(finished / "hf")) == average
    card = (tmp_path / "model" / "README.md").read_text()
    assert ("| weights | an exponential moving average" in card) == average
    assert ("(decay 0.9999; at first" in card) == average
    assert ("| weights | those after the last step |" in card) != average
    assert privacy(tmp_path / "model")["epsilon"] == privacy(finished)["epsilon"]
