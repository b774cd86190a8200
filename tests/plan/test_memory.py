"""Predicted memory: against the same step with real tensors, and as a user asks for it."""

import dataclasses
import json
import statistics
import sys

import pytest
import torch

import torchtitan_dp.distributed  # noqa: F401

# isort: split
import torchtitan_dp.plan.__main__ as plan
from tests.processes import forks
from tests.processes.ranks import on_ranks
from tests.processes.runs import CONFIG, ROOT, arguments, write_records
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape, trained_count
from torchtitan_dp.plan import memory
from torchtitan_dp.plan.fake_step import MemoryTracker, Step, fake_world, tracking
from torchtitan_dp.plan.memory import CATEGORIES, GIB, MemoryPlan
from torchtitan_dp.plan.prediction import answer
from torchtitan_dp.privacy.banded import NoiseChain
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.train.check import host_memory

TWO = ("--training.local_batch_size=2",)
SHARDED = "--parallelism.data_parallel_shard_degree=2"
GHOST = ("--privacy.gradient_method=ghost", *TWO)
ADAPTERS = ("--lora.rank=4", "--training.mixed_precision_param=bfloat16")
RECOMPUTED = ("--activation_checkpoint.mode=full",)
OFFLOAD = (*RECOMPUTED, "--activation_checkpoint.offload_inputs")


def small(*overrides):
    return [
        *(f"--job.config_file={CONFIG}", "--training.dataset_path=python-stdlib"),
        *("--validation.no-enable", "--training.seq_len=512", *overrides),
    ]


def run_step(kind, tracker, overrides, world_size):
    """Two microbatches around an update; the tracker's peak in the last two."""
    config = load_config(overrides, world_size)
    step = kind(config, shape(config), tracker)
    step.microbatch(config.training.seq_len)
    tracker.start_over()
    step.update()
    step.microbatch(config.training.seq_len)
    return step, tracker.peak_bytes, tracker.peak


def with_fake_tensors(overrides, world_size, kind=Step):
    with fake_world(world_size, like_cuda=False), tracking(like_cuda=False) as tracker:
        return run_step(kind, tracker, overrides, world_size)[1:]


def with_real_tensors(overrides, world_size, kind=Step):
    """The tracker's peak, and bounds on that of PyTorch's CPU allocator, which the tracker knows
    nothing of: what was alive before, and what the profiler saw allocated and freed since."""
    with tracking(like_cuda=False) as tracker:
        step, tracked, _ = run_step(kind, tracker, overrides, world_size)
        before = sum(tracker.current.values())
    return tracked, [before + bytes for bytes in allocated_peak(step)]


def allocated_peak(step):
    """Bounds on the most bytes that PyTorch's CPU allocator gave out during a microbatch.

    A microbatch leaves nothing behind. Bytes that seem to stay are those of frees that the profiler
    missed: gloo's threads, which it does not watch, may drop the last reference to a tensor that
    they sent. Whether they were missed before the peak or after it is not known. Each bound is the
    median of five microbatches.
    """
    bounds = [sorted(_peaks(step)) for _ in range(5)]
    return [statistics.median(column) for column in zip(*bounds, strict=True)]


def _peaks(step):
    """The peak as the profiler saw it, without and with the bytes that seem to stay."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step.microbatch(512)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak - alive, peak


def assert_predicted(predicted, tracked, allocated):
    """A collective's input may live longer than the tracker sees."""
    low, high = allocated
    print(f"predicted {predicted:,}, tracked {tracked:,}, allocated {low:,} to {high:,} bytes")
    assert predicted == pytest.approx(tracked, rel=0.05)
    assert 0.9 * low <= predicted <= 1.1 * high


@pytest.mark.thorough_cases("adapters", "average", "ghost norms*", "ring*", "two samples")
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (2, [*TWO, *RECOMPUTED, "--parallelism.context_parallel_rotate_method=alltoall"]),
        (2, [SHARDED, "--privacy.secure_noise"]),
        (1, GHOST),
        (2, [*GHOST, "--privacy.ghost_passes=two", SHARDED]),
        (1, ADAPTERS),
        (2, [SHARDED, "--ema.enable"]),
    ],
    ids=[
        *("one rank", "ring, per-sample, recomputed", "two samples"),
        *("ghost norms", "ghost norms, two passes", "adapters", "average"),
    ],
)
def test_predicted_is_what_real_tensors_take(world_size, overrides):
    predicted, parts = forks.call(with_fake_tensors, small(*overrides), world_size)
    tracked, allocated = on_ranks(world_size, with_real_tensors, small(*overrides), world_size)[0]
    assert set(parts) <= {*CATEGORIES, "gathered"}
    assert_predicted(predicted, tracked, allocated)


@pytest.mark.thorough_cases("adapters", "ghost", "no power of two", "windows")
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (4, [*TWO, "--privacy.gradient_method=microbatch"]),
        (6, ["--training.local_batch_size=3", "--training.seq_len=1536"]),
        (4, [*GHOST, "--privacy.ghost_passes=two", SHARDED]),
        (2, ["--data.long_records=window", "--data.windows_per_draw=2"]),
        (2, ADAPTERS),
    ],
    ids=["one at a time", "no power of two", "ghost", "windows", "adapters"],
)
def test_the_hosts_memory_needs_no_step_to_be_predicted(world_size, overrides):
    """What refuses a start is what a step takes, and what a save beside it copies is its state."""
    saving = ("--checkpoint.enable", "--checkpoint.async_mode=async")
    given = small(*OFFLOAD, *saving, *overrides)
    plan = forks.call(answer, given, world_size, 80, False)
    config = load_config(given, world_size)
    host = host_memory(config, shape(config))
    assert plan.host_bytes == host.inputs > 0
    assert plan.for_programs()["host_memory_gib"] == plan.host_bytes / GIB
    assert host.copy == pytest.approx(plan.parts["parameters"] + plan.parts["optimizer"], rel=0.02)


def test_bytes_of_the_noise_that_is_kept():
    """Of 5 bands, 4 fp32 values for each that a rank trains: predicted, and as a chain has them."""
    banded = small("--privacy.noise=banded", "--privacy.bands=5")
    _, parts = forks.call(with_fake_tensors, banded, 2)
    trained = trained_count(shape(load_config(banded, 2)))
    assert parts["earlier_noise"] == pytest.approx(4 * 4 * trained / 2, rel=0.01)
    chain, flat = NoiseChain.rehearsal(cut_off(5)), torch.zeros(1_000)
    with MemoryTracker("rest") as tracker:
        for step in range(7):
            chain.take(step).add_to(flat, "w", lambda x: x.add_(1.0))
            assert tracker.current["rest"] == 4 * (4 + 1) * len(flat)  # beside the shard itself


def test_the_tracker_counts_each_storage_once_until_it_is_freed():
    with MemoryTracker("rest") as tracker:
        with tracker.labelled("first"):
            a = torch.zeros(1000)
        view, b = a[:10], torch.zeros(500)
        assert tracker.current == {"first": 4000, "rest": 2000}
        del a
        assert tracker.current["first"] == 4000  # the view keeps it
        del view
        tracker.relabel([b], "other")
        assert tracker.current == {"first": 0, "rest": 0, "other": 2000}
        b.untyped_storage().resize_(0)
        assert tracker.current["other"] == 0
    assert tracker.peak_bytes == 6000
    assert tracker.peak == {"first": 4000, "rest": 2000}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("1b_1m_ac", 1_235_814_400), ("3b_512k_ac", 3_212_749_824), ("8b_256k_ac", 8_030_261_248)],
)
def test_the_longest_configs_fit_four_ranks_of_80_gib(name, parameters):
    """Optimizer state: two fp32 shards, not the whole shapes that DTensor tries operators on."""
    overrides = ["--job.config_file", str(ROOT / "train_configs" / f"llama3_{name}.toml")]
    found = forks.call(answer, overrides, 4, 80, False)
    assert (found.fits, found.host_bytes) == (True, 0)
    assert found.parts["parameters"] == pytest.approx(parameters * 4 / 4, rel=0.01)
    assert found.parts["optimizer"] == pytest.approx(2 * parameters * 4 / 4, rel=0.01)
    assert found.parts["accumulator"] == pytest.approx(parameters * 4 / 4, rel=0.01)


def plan_of(**terms):
    parts = dict.fromkeys(CATEGORIES, GIB) | {"activations": 90 * GIB}
    return dataclasses.replace(MemoryPlan(4, 512, parts, 80, {}), **terms)


@pytest.fixture(scope="module")
def config():
    return load_config(small(), 4)


def test_a_misfit_names_the_largest_part_and_what_fits(config):
    found = plan_of(longest_seq_len={"none": 256, "full": 4096})
    with pytest.raises(ValueError, match="largest part: activations") as error:
        memory.show_memory(found, config, sys.stdout, limited=True)
    line = str(error.value)
    assert "\n" not in line
    assert line.endswith(
        "fit: activation_checkpoint.mode = 'full', or training.seq_len = 256, or more ranks"
    )
    memory.show_memory(found, config, sys.stdout, limited=False)  # a warning


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_with_its_json(tmp_path, own_cache):
    command = arguments(tmp_path / "out", write_records(tmp_path / "data"))
    command += ["--world_size=2", "--memory_gib=0.01", f"--json={tmp_path / 'plan.json'}"]
    with pytest.raises(SystemExit) as stop:
        plan.main(command)
    assert stop.value.code == 2
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["fits"] is False
    assert content["longest_seq_len"] == {"none": None, "full": None}
    assert set(content["memory_gib"]) == set(CATEGORIES)
    assert content["peak_memory_gib"] == pytest.approx(sum(content["memory_gib"].values()))
    assert content["parameters"] == 1_872_576
    assert content["microbatches_per_step"] > 0
