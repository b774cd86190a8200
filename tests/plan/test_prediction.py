"""Few layers tell the peak of all, and so the longest sample."""

import dataclasses

import pytest

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from tests.plan.test_memory import small
from tests.processes import forks
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.prediction import Model, peak_of, search, stretches_of

LENGTHS = (8192, 16384, 65536)


def whole_and_extrapolated(overrides, mode):
    """Peaks of seven layers, predicted with all of them and with few."""
    config = load_config(overrides, 2)
    args = dataclasses.replace(shape(config), n_layers=7)
    with fake_world(2):
        whole = [max(stretches_of(config, args, mode, length).values()) for length in LENGTHS]
        return whole, [peak_of(config, args, mode, length) for length in LENGTHS]


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


def found_and_peaks(gib):
    """The longest sample; the peaks of all layers at it, and at twice as many tokens."""
    config = load_config(small(), 2)
    args = dataclasses.replace(shape(config), n_layers=7)
    length = search(config, args, 2, "full", int(gib * GIB))
    with fake_world(2):
        found = [stretches_of(config, args, "full", n) for n in (length, 2 * length)]
    return length, [max(one.values()) / GIB for one in found]


@pytest.mark.slow
def test_the_longest_sample_fits_and_twice_as_many_tokens_do_not():
    """With all layers, at lengths where the peak is no line in T."""
    length, (peak, above) = forks.call(found_and_peaks, 4)
    assert peak <= 4 < above, length
