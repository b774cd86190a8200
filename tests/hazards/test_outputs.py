"""Hazards of outputs, by row: labels, names, the tokenizer, trackers. These need one process;
test_run.py reads the files of a whole run."""

import functools
import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn as nn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from tests import build
from tests.hazards.test_trainer import loader
from tests.processes.ranks import on_ranks
from torchtitan_dp.models.parameters import trainable_parameters
from torchtitan_dp.train import outlets as outlets_module
from torchtitan_dp.train.outlets import Outlets, PublicLines
from torchtitan_dp.train.processor import PrivateMetricsProcessor
from torchtitan_dp.train.validate import HeldOutValidator, buckets

STATISTICS = {
    "loss": 1.25,
    "realized_batch_size": 3.0,
    "rejected": 0.0,
    "clipped_fraction": 0.5,
    "norm_p10": 1.0,
    "norm_p50": 2.0,
    "norm_p90": 3.0,
}


@pytest.fixture
def logged(monkeypatch, caplog):
    """The tags of one logged step, and its console line."""
    from torchtitan.tools.logging import logger
    from torchtitan.tools.utils import NoColor

    inner = MagicMock()
    metrics = PrivateMetricsProcessor.__new__(PrivateMetricsProcessor)
    vars(metrics).update(
        logger=Outlets([inner], private=True),
        time_last_log=0.0,
        ntokens_since_last_log=64,
        parallel_dims=SimpleNamespace(non_data_parallel_size=1),
        device_memory_monitor=MagicMock(),
        num_flops_per_token=1,
        gpu_peak_flops=float("inf"),  # unknown
        color=NoColor(),
        data_loading_times=[],
        _planned=4.0,
    )
    metrics.start_clock(6, 12, expected=1.0)
    peak = SimpleNamespace(max_active_gib=1.0, max_reserved_gib=2.0)
    metrics.device_memory_monitor.get_peak_stats.return_value = peak
    public = {"lr": 1e-3, "epsilon": 2.5, "noise_multiplier": 1.0}
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        metrics.log_step(7, public, STATISTICS)
    ((tags, step), _) = inner.log.call_args
    assert step == 7
    return tags, caplog.records[-1].getMessage()


PUBLIC = {"lr", "epsilon", "noise_multiplier"}


def test_row24_only_what_is_public_is_in_the_public_section(logged):
    tags, _ = logged
    public = {t for t in tags if not t.startswith("not_private/")}
    assert public == {f"private_to_publish/{name}" for name in PUBLIC}
    assert {f"not_private/{name}" for name in STATISTICS} < set(tags)
    assert not any("mfu" in t for t in tags)  # the device's peak is unknown


# Row 28: a wrapped weight has one name.


def test_row28_names_know_no_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.ModuleDict({"block": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))})
    names = set(trainable_parameters(plain))
    plain["block"][0] = checkpoint_wrapper(plain["block"][0])
    plain["block"] = torch.compile(checkpoint_wrapper(plain["block"]))
    assert set(dict(plain.named_parameters())) != names
    assert set(trainable_parameters(plain)) == names


# Row 33: buffers.


def buffers_after_a_microbatch():
    built = build.build((1, 1, 1))
    before = {n: b.clone() for n, b in built.model.named_buffers()}
    built.accumulate(*build.data(samples=1))
    return {n: torch.equal(b, before[n]) for n, b in built.model.named_buffers()}


def test_row33_a_microbatch_changes_no_buffer():
    (same,) = on_ranks(1, buffers_after_a_microbatch)
    assert same
    assert all(same.values())


# Row 34: held-out records, and the tokenizer.


def test_row34_the_held_out_loss_is_labelled(monkeypatch, caplog):
    from torchtitan.tools.logging import logger

    validator = MagicMock(_loader=loader(), is_trial=False)
    validator._config.training.seq_len, validator._config.training.steps = 8, 7
    validator._positions.return_value = np.empty(0, dtype=np.int64)
    validator._publish, model = None, nn.Linear(2, 2)
    vars(model)["meeting"] = None
    validator._dims.get_optional_mesh.return_value = None
    validator._buckets = buckets(8)
    validator._held_out = functools.partial(HeldOutValidator._held_out, validator)
    monkeypatch.setattr(logger, "propagate", True)
    model = nn.Linear(2, 2)
    model.meeting = None
    with caplog.at_level(logging.INFO):
        HeldOutValidator.validate(validator, [model], 3)
        validator.is_trial = True  # a search must not choose by it
        HeldOutValidator.validate(validator, [model], 3)
    line, of_trial = (record.getMessage() for record in caplog.records)
    assert line == "step: 3/7  not private: held-out loss: nan, averaged weights: nan"
    assert "nan" not in of_trial


@pytest.mark.parametrize("ends", [9, 8])
def test_row73_trackers_get_what_one_job_would_send(ends, tmp_path, monkeypatch):
    """Over a crash, a stop and resumes; and nothing of a run that has not come to its end."""
    got = {}
    every = {"one": [(0, 9)], "several": [(0, 5), (4, 7), (4, 9)]}  # steps loaded, and the last
    for name, jobs in every.items():
        folder, tracker = tmp_path / name, MagicMock()
        folder.mkdir()
        monkeypatch.setattr(outlets_module, "WandB", tracker)
        for loaded, last in jobs:
            outlets = Outlets([PublicLines(str(folder), loaded)], private=True)
            for step in range(loaded + 1, min(last, ends) + 1):
                outlets.log({"lr": step / 8, "loss": 3.0}, step)
                # A validation's scalars come by themselves; a lost step may be logged otherwise.
                if step == (5 if (name, loaded) == ("several", 0) else 6):
                    outlets.log({"heldout_loss_noised": 1.5}, step)
            if last == ends:
                outlets.send()
            outlets.close()
        got[name] = [call.args for call in tracker.return_value.log.call_args_list]
        assert tracker.call_count == (ends == 9)
    assert got["one"] == got["several"]
    assert [step for _, step in got["one"]] == (list(range(1, 10)) if ends == 9 else [])
