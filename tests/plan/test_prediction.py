"""Few layers tell the peak of all; the longest sample takes two predictions and a check."""

import dataclasses

import pytest

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from tests.plan.test_memory import small
from tests.processes import forks
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.memory import GIB, LONGEST
from torchtitan_dp.plan.prediction import Model, line, longest, peaks_of, stretches_of, two_lengths

LENGTHS = (8192, 16384, 65536)  # the first two are those of the line


def whole_and_extrapolated(overrides, mode):
    """Peaks of seven layers, predicted with all of them and with few."""
    config = load_config(overrides, 2)
    args = dataclasses.replace(shape(config), n_layers=7)
    with fake_world(2):
        whole = [max(one.values()) for one in stretches_of(config, args, mode, LENGTHS)]
        return whole, peaks_of(config, args, mode, LENGTHS)


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


@pytest.mark.parametrize("overrides", [(), ("--parallelism.keep_weights_gathered",)])
def test_the_first_microbatch_takes_what_any_other_takes(overrides):
    first, second = forks.call(peak_at_any_time, small(*overrides))
    assert first == pytest.approx(second, abs=4096)  # of nearly 90 MB


LIMIT = 76 * GIB


@pytest.mark.parametrize("per_token", [1, 10**5, 10**9])
def test_a_line_and_a_check_find_the_longest_sample(per_token):
    asked = []

    def peak(length: int) -> float:
        asked.append(length)
        return 20 * GIB + per_token * length

    peaks = [20 * GIB + per_token * length for length in two_lengths(8)]
    found = longest(peak, line(peaks, 8), LIMIT, 8)
    fitting = [8 << k for k in range(20) if 20 * GIB + per_token * (8 << k) <= LIMIT]
    assert found == (min(fitting[-1], LONGEST) if fitting else None)
    assert len(asked) == 1


def test_where_the_line_was_too_low_or_too_high_what_decides_is_found():
    flat = line([20.0 * GIB] * 2, 8)
    assert longest(lambda length: LIMIT + (length > 1000), flat, LIMIT, 8) == 8 << 6
    assert longest(lambda length: LIMIT + 1, flat, LIMIT, 8) is None
    assert longest(lambda length: LIMIT, line([1.02 * LIMIT] * 2, 8), LIMIT, 8) == LONGEST
