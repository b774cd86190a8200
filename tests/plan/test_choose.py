"""The choice of a setting by predicted seconds, and the fewest ranks for a sample."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import build
from tests.processes import forks
from torchtitan_dp.config.load import load_config, seeks_fewest_ranks
from torchtitan_dp.plan import __main__ as plan
from torchtitan_dp.plan import choose
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.roofline import MACHINES

CP, H100 = "parallelism.context_parallel_degree", MACHINES["h100"]
DEBUG = "train_configs/llama3_debug.toml"
LLAMA = (
    *("--model.name=llama3", "--model.flavor=debug", "--training.seq_len=512"),
    *("--activation_checkpoint.mode=none", "--training.global_batch_size=8"),
    *("--training.dataset_path=python-stdlib", "--privacy.noise_multiplier=1"),
    "--privacy.delta=1e-5",
)


def mesh(keys):
    return tuple(value for key, value in keys.items() if key.endswith("_degree"))


def test_meshes_share_samples_and_fill_nodes():
    for ranks in (1, 8, 16):
        meshes = {mesh(keys) for keys in choose.candidates(build.config(), ranks)}
        assert all(math.prod(degrees) == ranks for degrees in meshes)
        assert all(shard * cp <= max(8, cp) for _, shard, cp in meshes)
    assert {(2, 8, 1), (16, 1, 1)} <= meshes
    assert max(cp for *_, cp in meshes) == 8  # too few tokens for a ring between nodes


def test_what_needs_more_memory_than_what_does_not_fit_is_not_tried():
    one, *_ = choose.candidates(build.config(), 8)
    assert (one[CP], one["activation_checkpoint.mode"]) == (1, "none")
    recomputed = one | {"activation_checkpoint.mode": "full"}
    kept = one | {"parallelism.keep_weights_gathered": True}
    for more, less in ((one, recomputed), (kept, one), (one, one | {CP: 2})):
        assert choose.needs_more(more, less)
        assert not choose.needs_more(less, more)
    assert not choose.needs_more(kept | {CP: 2}, one)


@pytest.fixture
def predicted(monkeypatch):
    """Makes up the memory of settings, GiB by cp, a tenth if recomputed; which were asked for."""
    asked = []

    def peak(overrides, ranks, keys):
        asked.append(keys)
        share = 1 if keys["activation_checkpoint.mode"] == "none" else 0.1
        return 100 * GIB / keys[CP] * share, 1

    monkeypatch.setattr(choose, "_peak", peak)
    monkeypatch.setattr(choose, "processes", lambda: ThreadPoolExecutor(1))
    return asked


def test_the_fastest_that_fit_come_first(predicted):
    found = choose.choose([*LLAMA, "--training.seq_len=8192"], 4, H100, 80.0, 100, 0.1)
    totals = [one.step.total for one in found]
    assert totals == sorted(totals)
    assert len(found) == choose.SHOWN
    assert all(one.peak_bytes <= 80 * GIB for one in found)
    assert len({str(keys) for keys in predicted}) == len(predicted)
    with pytest.raises(ValueError, match="no setting fits in 1 GiB"):
        choose.choose([*LLAMA, "--training.seq_len=8192"], 4, H100, 1.0, 100, 0.1)


@pytest.mark.parametrize(("fewest", "expected"), [(1, 1), (3, 4), (9, 8)])
def test_the_fewest_ranks_that_fit_share_a_sample(fewest, expected, monkeypatch):
    monkeypatch.setattr(choose, "_fits", lambda *terms: terms[-1] >= fewest)
    monkeypatch.setattr(choose, "processes", lambda: ThreadPoolExecutor(1))
    key = f"parallelism.context_parallel_degree={expected}"
    assert choose.fewest_ranks([*LLAMA], 8, 80.0) == [f"--{key}"]
    assert seeks_fewest_ranks([*LLAMA])
    assert not any(seeks_fewest_ranks([*LLAMA, f"--{CP}={given}"]) for given in (2, -1))


def test_ranks_are_left_as_they_are_where_nothing_can_be_predicted(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plan, "memory_here_gib", lambda ranks: 1 / 0)
    command = [f"--job.config_file={DEBUG}", f"--job.dump_folder={tmp_path / 'out'}"]
    assert plan.main([*command, "--world_size=2", "--ranks_here=2"]) == []
    assert "'auto': no memory could be predicted (ZeroDivisionError" in capsys.readouterr().err


def test_a_rank_fits_with_what_its_communicators_take():
    """0.26 GiB of tensors and four communicators, or 0.14 and five."""
    overrides = [*LLAMA, "--training.seq_len=8192"]
    found = [
        forks.call(choose._fits, overrides, 2, gib, cp)
        for gib, cp in ((2.3, 1), (2.5, 1), (2.7, 2), (2.9, 2))
    ]
    assert found == [False, True, False, True]


def test_what_fits_easily_is_not_predicted(monkeypatch):
    """Which would take seconds of each start."""
    monkeypatch.setattr(choose, "step_peak", lambda *_: pytest.fail("it was predicted"))
    assert choose._fits([*LLAMA, "--training.seq_len=512"], 2, 80.0, 1)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--machine=tpu"], "--machine = 'tpu': it is none of a100, h100, h200, b200"),
        (["--choose"], "--choose: needs --machine, one of a100"),
    ],
)
def test_options_that_need_others_are_refused(options, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan.main([f"--job.config_file={DEBUG}", *options])
    assert line in capsys.readouterr().err


def test_a_setting_is_predicted_at_once(tmp_path, capsys):
    command = [f"--job.config_file={DEBUG}", f"--job.dump_folder={tmp_path / 'out'}"]
    keys = ("--parallelism.context_parallel_degree=2", "--no_memory", "--json=-")
    plan.main([*command, "--gpus=2", "--machine=h200", *keys])
    said = capsys.readouterr()
    assert "predicted for h200: " in said.err
    assert json.loads(said.out)["hours"] > 0


@pytest.mark.slow
def test_a_choice_is_shown(tmp_path, capsys):
    command = [f"--job.config_file={DEBUG}", f"--job.dump_folder={tmp_path / 'out'}"]
    plan.main([*command, "--gpus=2", "--machine=h100", "--choose", "--json=-"])
    said = capsys.readouterr()
    assert "the fastest that fit" in said.err
    first, *_ = json.loads(said.out)["choices"]
    (line,) = (line for line in said.err.splitlines() if line.startswith("chosen: "))
    config = load_config([*command, *line.split()[1:]], 2)
    assert config.parallelism.context_parallel_degree == first["keys"][CP]
