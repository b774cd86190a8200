"""Few layers tell the peak of all; the longest sample takes two predictions and a check."""

import dataclasses

import pytest

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from tests.plan.test_memory import small
from tests.processes import forks
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan import prediction
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.memory import GIB, LONGEST
from torchtitan_dp.plan.prediction import Extrapolated, Model, Whole, longest

KEEP = "--parallelism.keep_weights_gathered"
UNIT = 1
LENGTHS = (8192, 16384, 65536)  # the first two are those of the line


def whole_and_extrapolated(overrides, mode):
    """Peaks of seven layers, predicted with all of them and with few."""
    config = load_config(overrides, 2)
    args = dataclasses.replace(shape(config), n_layers=7)
    with fake_world(2):
        whole = Whole(config, args, mode)
        return whole.estimate(*LENGTHS), Extrapolated(whole, 80 * GIB, UNIT).estimate(*LENGTHS)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(
    "overrides",
    [(), ("--training.local_batch_size=2", "--parallelism.data_parallel_shard_degree=2")],
    ids=["microbatch, cp 2", "grad_sample, dp_shard 2"],
)
def test_few_layers_tell_the_peak_of_all(overrides, mode):
    whole, few = forks.call(whole_and_extrapolated, small(*overrides), mode)
    assert few == pytest.approx(whole, rel=1e-3)


def peak_at_any_time(overrides):
    """The peak of a first microbatch, and of one after it, beside the optimizer's state."""
    config = load_config(overrides, 2)
    with fake_world(2):
        model = Model(config, shape(config), "none")
        return [max(model.stretches(2048).values()) for _ in range(2)]


@pytest.mark.parametrize("overrides", [(), (KEEP,)])
def test_the_first_microbatch_takes_what_any_other_takes(overrides):
    first, second = forks.call(peak_at_any_time, small(*overrides))
    assert first == pytest.approx(second, abs=4096)  # of nearly 90 MB


class Line:
    """A peak that is a line in T, but may be decided to be another; counts what it is asked."""

    def __init__(self, at_zero: int, per_token: int, decided=None) -> None:
        self.at_zero, self.per_token = at_zero, per_token
        self.of, self.update = decided or self.at, float(at_zero)
        self.estimated: list[int] = []
        self.decided: list[int] = []

    def at(self, length: int) -> float:
        return float(self.at_zero + self.per_token * length)

    def estimate(self, *lengths: int) -> list[float]:
        self.estimated += lengths
        return [self.at(length) for length in lengths]

    def decide(self, seq_len: int) -> float:
        self.decided.append(seq_len)
        return self.of(seq_len)


LIMIT = 76 * GIB


@pytest.mark.parametrize("per_token", [1, 10**5, 10**9])
def test_two_predictions_and_a_check_find_the_longest_sample(per_token):
    peaks = Line(20 * GIB, per_token)
    found = longest(peaks, LIMIT, 8)
    fitting = [8 << k for k in range(20) if peaks.at(8 << k) <= LIMIT]
    assert found == (min(fitting[-1], LONGEST) if fitting else None)
    assert len(peaks.estimated) == 2
    assert len(peaks.decided) == 1


def test_where_the_line_was_too_low_a_shorter_sample_is_found():
    """What is decided on is held against the limit itself, down to what fits."""
    for at_zero, decided, found in (
        (20 * GIB, lambda length: LIMIT + (length > 1000), 8 << 6),
        (20 * GIB, lambda length: LIMIT + 1, None),
        (77 * GIB, None, None),  # the update does not fit
    ):
        assert longest(Line(at_zero, 10**5, decided), LIMIT, 8) == found


def answered_with_a_bend(overrides, tolerance):
    """The longest sample, where few layers are held to be off by more than the tolerance."""
    prediction.TOLERANCE = tolerance
    few = []
    whole_of = prediction.Whole

    class Watched(whole_of):
        def decide(self, seq_len):
            few.append(seq_len)
            return super().decide(seq_len)

    prediction.Whole = Watched
    prediction.ENOUGH_LAYERS = 2
    plan = prediction.answer(overrides, 1, 80.0, True)
    return plan.longest_seq_len, few


@pytest.mark.thorough
@pytest.mark.slow
def test_what_bends_is_predicted_with_all_layers():
    overrides = small("--training.seq_len=8192", "--activation_checkpoint.mode=full")
    (few, asked), (whole, again) = (
        forks.call(answered_with_a_bend, overrides, tolerance) for tolerance in (0.005, -1.0)
    )
    assert few == whole
    assert not asked  # here: the search is in another process
    assert again


def test_close_to_the_limit_and_below_some_thousand_tokens_all_layers_decide(monkeypatch):
    config = load_config(small(), 2)
    args = dataclasses.replace(shape(config), n_layers=32)
    whole = Whole(config, args, "none")
    quick = Extrapolated(whole, limit=1000, unit=1)
    quick.short = 10
    monkeypatch.setattr(quick, "estimate", lambda *lengths: [float(n) for n in lengths])
    whole.known |= {9: -5.0, 969: -1.0, 971: -2.0, 1029: -3.0, 1031: -4.0}
    decided = [quick.decide(n) for n in (9, 969, 971, 1029, 1031)]
    assert decided == [-5.0, 969.0, -2.0, -3.0, 1031.0]
