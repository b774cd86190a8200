"""A run's lines: the pace of its steps, long steps, and batches without a loss."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.train import processor
from torchtitan_dp.train.processor import PrivateMetricsProcessor, SampleStatistics, samples_words


class Clock:
    """Replaces `time.monotonic`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.shown = 100.0
        patch.setattr(processor.time, "monotonic", lambda: self.shown)


def test_a_long_step_has_a_line_a_minute(monkeypatch, caplog) -> None:
    """Of microbatches and time, so it is labelled. Shorter steps have none of it."""
    clock, metrics = Clock(monkeypatch), PrivateMetricsProcessor.__new__(PrivateMetricsProcessor)
    metrics.ntokens_since_last_log = 0
    metrics.start_clock(6, 12, expected=8.0)
    monkeypatch.setattr(processor.logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            clock.shown += 25
            metrics.microbatch_begun(64)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "step: 7/12  not private: microbatch: 3 of about 8  s/step: ?  ETA: ?"
    assert metrics.ntokens_since_last_log == 320


def test_an_empty_draw_is_shown_as_empty() -> None:
    """And a step that lost all its samples as that: neither has a loss, and `nan` looks broken."""
    empty = {"realized_batch_size": 0.0, "rejected": 0.0}
    assert samples_words(empty) == "batch: 0 (an empty draw)"
    lost = {**empty, "realized_batch_size": 3.0, "rejected": 3.0}
    assert samples_words(lost) == "batch: 3, all left out (not finite)"
    some = {**lost, "rejected": 1.0, "loss": 2.5, "clipped_fraction": 0.5, "norm_p50": 1.5}
    words = "loss: 2.5000  batch: 3  left out (not finite): 1  clipped: 50%  norm p50: 1.5"
    assert samples_words(some) == words


def test_a_step_without_a_finite_sample_has_counts_alone() -> None:
    """No NaN goes to TensorBoard."""
    dims: Any = SimpleNamespace(get_optional_mesh=lambda _: None)
    statistics, yes = SampleStatistics(), torch.tensor([True])
    assert statistics.reduce(dims) == {"realized_batch_size": 0.0, "rejected": 0.0}
    lost = Clip(torch.zeros(1), yes, torch.tensor([torch.nan]).double(), ~yes)
    statistics.add(torch.tensor([torch.inf]), yes, lost)
    assert statistics.reduce(dims) == {"realized_batch_size": 1.0, "rejected": 1.0}
    statistics.add(torch.ones(1), yes, Clip(torch.ones(1), ~yes, torch.ones(1).double(), ~yes))
    found = statistics.reduce(dims)
    assert (found["loss"], found["norm_p90"], found["clipped_fraction"]) == (1.0, 1.0, 0.0)
