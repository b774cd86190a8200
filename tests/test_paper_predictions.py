"""What is predicted of plain TorchTitan's step, and from few layers; one tiny table, whole."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from scripts.benchmarking.counts import Case, count_here
from scripts.benchmarking.paper_predictions import CP, FSDP, Task, peak_bytes, predict_here, work
from tests.plan.test_memory import allocated_peak, assert_predicted, small
from tests.processes import forks
from tests.processes.ranks import on_ranks
from tests.processes.runs import ROOT
from tests.test_paper_tables import check_marks
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape


def run_plain_step(tracker, overrides, world_size):
    """Two microbatches around an update; the tracker's peak in the last two."""
    from scripts.benchmarking.plain_step import PlainStep

    config = load_config([*overrides, "--privacy.no-enable"], world_size)
    step = PlainStep(config, shape(config), tracker)
    step.microbatch(config.training.seq_len)
    tracker.start_over()
    step.update()
    step.microbatch(config.training.seq_len)
    return step, tracker.peak_bytes


def with_fake_tensors(overrides, world_size):
    from torchtitan_dp.plan.fake_step import fake_world
    from torchtitan_dp.plan.tracker import tracking

    with (
        fake_world(world_size, like_cuda=False),
        tracking(like_cuda=False) as tracker,
    ):
        return run_plain_step(tracker, overrides, world_size)[1]


def with_real_tensors(overrides, world_size):
    from torchtitan_dp.plan.tracker import tracking

    with tracking(like_cuda=False) as tracker:
        step, tracked = run_plain_step(tracker, overrides, world_size)
        before = sum(tracker.current.values())
    return tracked, [before + bytes for bytes in allocated_peak(step)]


@pytest.mark.thorough_cases("FSDP", "one rank")
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (2, ["--activation_checkpoint.mode=full", "--training.local_batch_size=2"]),
        (2, ["--parallelism.context_parallel_degree=1"]),
    ],
    ids=["one rank", "ring, recomputed", "FSDP"],
)
def test_predicted_is_what_a_plain_step_takes(world_size, overrides):
    predicted = forks.call(with_fake_tensors, small(*overrides), world_size)
    tracked, allocated = on_ranks(world_size, with_real_tensors, small(*overrides), world_size)[0]
    assert_predicted(predicted, tracked, allocated)


def few_and_all(task):
    """Peak, FLOPs and bytes of eight layers: told from few, and predicted with all."""
    from scripts.benchmarking.plain_step import PlainStep
    from torchtitan_dp.plan.fake_step import Step, fake_world
    from torchtitan_dp.plan.peaks import Model

    few = peak_bytes(task, task.seq_len), work(task)
    case = task.case()
    config = load_config(case.arguments(task.seq_len), task.world_size)
    args, mode = shape(config), config.activation_checkpoint.mode
    assert args.n_layers == 8
    with fake_world(task.world_size):
        model = Model(config, args, mode, PlainStep if task.arm.startswith("non-DP") else Step)
        peak = model.at(task.seq_len)[0]
        model.close()
    counted = count_here(case, [task.seq_len])["microbatch"][task.seq_len]
    whole = peak, {name: sum(getattr(counted, name).values()) for name in ("flops", "bytes")}
    return few, whole


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arm", "mesh", "local_batch_size"),
    [
        ("non-DP", FSDP, 2),
        ("ghost", FSDP, 2),
        ("V1", CP, 2),
        ("V2 + AC", CP, 1),
        ("non-DP + AC", CP, 1),
        ("microbatch", CP, 1),
    ],
)
def test_few_layers_tell_of_all(arm, mesh, local_batch_size):
    task = Task("30M", arm, 2, mesh, local_batch_size, 1024)
    few, whole = forks.call(few_and_all, task)
    assert few[0] == pytest.approx(whole[0], rel=1e-3)
    assert few[1] == pytest.approx(whole[1], rel=1e-3)


def test_the_mesh_and_the_arm_are_what_is_predicted():
    """Which overrides come last wins, and the model is laid out by it."""
    for mesh, cp in ((FSDP, 1), (CP, 4)):
        task = Task("debug", "V1", 4, mesh, 2, 512)
        config = load_config(task.case().arguments(512), 4)
        assert config.parallelism.context_parallel_degree == cp
        assert config.parallelism.data_parallel_shard_degree == 4 // cp
        assert config.privacy.gradient_method == "grad_sample"
        assert not config.privacy.shard_grad_samples
        assert config.training.local_batch_size == 2
    case = Task("debug", "non-DP + AC", 4, CP, 1, 512).case()
    assert isinstance(case, Case)
    config = load_config(case.arguments(512), 4)
    assert (case.method, config.privacy.enable) == ("plain", False)
    assert config.activation_checkpoint.mode == "full"


def predicted_of(tasks):
    return [predict_here(task) for task in tasks]


@pytest.mark.thorough
def test_a_longer_sample_takes_more_and_the_longest_is_found():
    row = Task("debug", "V2", 2, CP, 2, 256)
    longer = dataclasses.replace(row, seq_len=512)
    found, more, longest = forks.call(
        predicted_of, [row, longer, dataclasses.replace(row, seq_len=None)]
    )
    assert found["fits"]
    assert found["peak_memory_gib"] < more["peak_memory_gib"]
    assert found["flops"] < more["flops"]
    assert longest["peak_memory_gib"] <= 76 < longest["peak_memory_gib_beyond"]


@pytest.mark.thorough
def test_a_tiny_table_of_the_paper_whole(tmp_path):
    forks.need()
    output, markdown = tmp_path / "t.json", tmp_path / "t.md"
    output.write_text(json.dumps({"paper_tables": {"5": {"cpu": {}}}}))
    done = subprocess.run(
        [
            *(sys.executable, "scripts/benchmark.py", "--table", "3", "--parts", "measured"),
            *("--devices", "2", "--batch_sizes", "2", "--microbatches", "1", "--rounds", "1"),
            *("--json", str(output), "--markdown", str(markdown)),
            *("--training.seq_len=64", "--privacy.accountant=rdp"),
        ],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    stored = json.loads(output.read_text())["paper_tables"]
    assert stored["5"] == {"cpu": {}}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    entry = stored["3"][kind]["debug"]
    assert [row["name"] for row in entry["rows"]] == ["non-DP", "ghost"]
    for row in entry["rows"]:
        assert (row["seq_len"], row["local_batch_size"], row["world_size"]) == (32, 2, 2)
        assert row["tokens_per_second"] > 0
        assert row["mesh"] == FSDP
    assert check_marks(markdown.read_text())["measured"] == 5
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["t.json", "t.md"]
