"""One block's tensors by phase: of the real step, and of toys that show where tensors belong."""

from collections import Counter

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.processes import forks
from tests.processes.runs import CONFIG
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.timeline import (
    ATTENTION,
    FEED_FORWARD,
    FORWARD,
    PHASES,
    RECOMPUTED,
    WORKSPACE,
    Peak,
    Row,
    Timeline,
    markdown,
    timeline,
)

T = 65536


def given(*overrides):
    return [
        f"--job.config_file={CONFIG}",
        "--training.dataset_path=python-stdlib",
        "--validation.no-enable",
        f"--training.seq_len={T}",
        "--training.loss_chunk_tokens=512",
        "--training.mixed_precision_param=bfloat16",
        "--parallelism.context_parallel_rotate_method=alltoall",
        *overrides,
    ]


RECOMPUTES = given("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")


def both(overrides, world_size):
    """The timeline, and the plan's peaks by block, of which the third of four is the middle one."""
    from torchtitan_dp.plan.fake_step import fake_world
    from torchtitan_dp.plan.peaks import Model

    config = load_config(overrides, world_size)
    with fake_world(world_size):
        model = Model(config, shape(config), config.activation_checkpoint.mode)
        found = model.stretches(T)
        model.close()
    return timeline(overrides, world_size), found["before last"]


@pytest.fixture(scope="module")
def recomputed():
    return forks.call(both, RECOMPUTES, 2)


def rows_of(peak, beginning):
    return {row: size for row, size in peak.rows.items() if row.name.startswith(beginning)}


def test_rows_add_up_to_each_phases_bytes(recomputed):
    peaks, _ = recomputed
    assert tuple(peaks) == PHASES
    for peak in peaks.values():
        assert peak.rows.total() == peak.bytes


def test_the_highest_phase_is_what_the_plan_has_for_the_blocks_backward(recomputed):
    peaks, planned = recomputed
    assert max(peaks[phase].bytes for phase in PHASES[1:]) == planned


def test_phases_have_what_belongs_to_them(recomputed):
    peaks, _ = recomputed
    forward, again, of_feed_forward, of_attention = peaks.values()
    assert not any("backward" in row.name for row in forward.rows)
    assert rows_of(again, "offload: buffer")
    of_both = {row.name.split(".")[0].split(":")[0] for row in of_feed_forward.rows}
    assert of_both >= {"feed_forward", "attention", "ring", "offload", "parameters"}
    assert any(row.name.endswith("backward") for row in rows_of(of_feed_forward, "feed_forward"))
    partial = [row for row in rows_of(of_attention, "ring") if row.dtype == "float32"]
    assert any(row.name.endswith(", like q, k, backward") for row in partial)
    assert any(row.name.endswith(", like k and v, backward") for row in partial)


def test_neighbours_are_named_as_such(recomputed):
    """The gradient of its output comes from the block above; below is the input of the next."""
    peaks, _ = recomputed
    assert rows_of(peaks[FEED_FORWARD], "block +1")
    assert rows_of(peaks[FORWARD], "block -1")


def test_a_block_that_is_kept_recomputes_nothing():
    peaks = forks.call(timeline, given("--activation_checkpoint.mode=none"), 2)
    assert tuple(peaks) == (FORWARD, FEED_FORWARD, ATTENTION)
    assert not any(rows_of(peak, "offload") for peak in peaks.values())


class Tiled(torch.autograd.Function):
    """Differentiates by autograd of its own, as recomputing tiles do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        room = torch.empty(7, 1000)
        with torch.enable_grad():
            tile = x.detach().requires_grad_()
            torch.autograd.backward(torch.sin(tile), grad)
        del room
        return tile.grad


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Apply(torch.exp), Apply(Tiled.apply)

    def forward(self, x):
        h = x + self.attention(x)
        return h + self.feed_forward(h)


class Idle(nn.Module):
    """Makes nothing but views."""

    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = (Apply(lambda x: x.view_as(x)) for _ in range(2))

    def forward(self, x):
        return self.feed_forward(self.attention(x))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): block() for number in range(3)})

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return x


def toy(workspace=None, block=Block):
    model = Model(block)
    with Timeline("activations", workspace) as tracker:
        x = torch.ones(3, 500, requires_grad=True)
        tracker.watch(model)
        model(x).sum().backward()
    return tracker.peaks()


def test_what_a_functions_own_backward_makes_is_its_modules():
    peaks = toy()
    assert tuple(peaks) == (FORWARD, FEED_FORWARD, ATTENTION)
    assert peaks[FEED_FORWARD].rows[Row("feed_forward: buffer, backward", "7 × 1,000", "float32")]
    names = {row.name for row in peaks[FEED_FORWARD].rows}
    assert "feed_forward: sin, backward" in names
    assert not rows_of(peaks[ATTENTION], "feed_forward: buffer")


def test_rows_of_one_block_are_not_those_of_another():
    rows = toy()[FEED_FORWARD].rows
    exponential = Row("block -1 attention: exp", "3 × 500", "float32")
    assert rows[exponential] == rows[exponential._replace(name="attention: exp")] == 6000
    assert Row("before the model: ones", "3 × 500", "float32") in rows


def test_recomputation_that_stops_early_ends_its_phase():
    """As soon as the last tensor that backward needs is there, in the middle of modules."""
    peaks = toy(block=lambda: checkpoint_wrapper(Block()))
    assert tuple(peaks) == PHASES
    assert peaks[FEED_FORWARD].rows[Row("feed_forward: buffer, backward", "7 × 1,000", "float32")]
    assert not rows_of(peaks[RECOMPUTED], "feed_forward: buffer")
    assert rows_of(peaks[RECOMPUTED], "attention: exp")


def test_a_phase_that_makes_nothing_has_what_it_begins_with():
    forward = toy(block=Idle)[FORWARD]
    assert forward.rows == {Row("before the model: ones", "3 × 500", "float32"): 6000}


def test_a_kernels_workspace_has_a_row():
    exp, size = torch.ops.aten.exp.default, 10**6
    forward = toy(lambda operator, _: size * (operator is exp))[FORWARD]
    assert forward.rows[Row(WORKSPACE, "", "")] == size
    assert forward.rows.total() == forward.bytes
    assert not rows_of(toy()[FORWARD], WORKSPACE)


def table(**rows):
    """A table of two phases, the second half of the first."""
    first = Counter({Row(name, "2 × 3", "bfloat16"): size for name, size in rows.items()})
    second = Counter({row: size // 2 for row, size in first.items()})
    peaks = {FORWARD: Peak(first.total(), first), ATTENTION: Peak(second.total(), second)}
    return [line.strip("|").split("|") for line in markdown(peaks).splitlines()]


def test_the_table_adds_up_what_is_small():
    head, _, *lines = (
        [cell.strip() for cell in line]
        for line in table(small=GIB, smaller=GIB // 2, large=90 * GIB, middle=30 * GIB)
    )
    assert head == ["tensor", "shape", "dtype", FORWARD, ATTENTION]
    assert lines == [
        ["large", "2 × 3", "bfloat16", "90.00", "45.00"],
        ["middle", "2 × 3", "bfloat16", "30.00", "15.00"],
        ["all others, below 2% of the peak", "", "", "1.50", "0.75"],
        ["**all**", "", "", "**121.50**", "**60.75**"],
    ]
