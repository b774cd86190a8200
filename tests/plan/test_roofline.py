"""What a step is expected to take: closed forms, against the real step and published figures."""

import dataclasses
import json
import statistics
import sys

import pytest

from scripts.benchmarking import counts
from tests import build
from tests.processes import forks
from tests.processes.runs import ROOT
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import flavor, shape
from torchtitan_dp.plan.roofline import (
    MACHINES,
    Machine,
    Weights,
    _link,
    flops_of,
    step_cost,
    step_seconds,
    weights_of,
)

sys.path.insert(0, str(ROOT / "scripts"))  # as the script is called
import roofline

# Values of one block of `build.ARGS`: queries, keys, values and output, then three of the
# feed-forward. Its D is 24, with 4 heads for queries and 2 for keys, and 64 hidden units.
BLOCK = 24 * 24 + 2 * 24 * 12 + 24 * 24 + 3 * 24 * 64
OUTPUT = build.VOCABULARY * 24


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_step_is_of_its_samples(mode):
    config = build.config(f"--activation_checkpoint.mode={mode}", degrees=(1, 1, 2))
    found = step_cost(config, shape(config), records=10, rate=0.4)
    assert found.flops_per_step == pytest.approx(4 * found.flops_per_sample)
    assert found.tokens_per_step == pytest.approx(4 * build.T, rel=1e-6)
    assert found.recomputes == (mode == "full")


def test_weights_are_those_of_products():
    """The embedding is looked up, and a tied one is multiplied with as the output."""
    assert weights_of(build.ARGS) == (Weights(2 * BLOCK, 2 * BLOCK), Weights(OUTPUT, OUTPUT))
    tied = flavor("1B")
    assert tied.tie_embeddings
    assert weights_of(tied)[1].trained == weights_of(tied)[1].all == 128_256 * 2048


T, RANK = 512, 4


def counted_and_predicted(case):
    """What the real step takes on fake tensors, and by the closed form."""
    config = load_config(case.arguments(T), 1)
    args = shape(config)
    args.n_layers = case.n_layers
    (found,) = counts.count_here(case, [T])
    return found, flops_of(config, args), weights_of(args), args


@pytest.mark.parametrize(
    ("mode", "more"), [("none", ()), ("full", ()), ("none", (f"--lora.rank={RANK}",))]
)
def test_the_real_step_takes_as_many_flops(mode, more):
    """Recomputation may stop before the last product, whose result no gradient needs. Below its
    adapters nothing is trained: the first block's queries, keys and values need no gradient of
    their input."""
    overrides = (f"--activation_checkpoint.mode={mode}", *more)
    case = counts.Case("debug", "microbatch", 1, 1, overrides=overrides, n_layers=2)
    found, flops, (blocks, output), args = forks.call(counted_and_predicted, case)
    assert flops.attention == found.attention / 2  # as if no mask were causal
    if mode == "full":
        assert flops.products - 0.25 * 2 * T * blocks.all <= found.products <= flops.products
    elif more:
        assert output.trained == 0 < 2 * blocks.trained < blocks.all
        keys = args.n_kv_heads * args.head_dim
        spared = 2 * T * args.dim * (args.dim + 2 * keys + 3 * RANK)
        assert flops.products == found.products + spared
    else:
        assert flops.products == found.products


ONES = Machine("ones", 1e12, 1e9, 1e9, 80, 1.0)


def seconds(*overrides, degrees=(1, 1, 1), microbatches=1.0, machine=ONES):
    config = build.config("--training.mixed_precision_param=bfloat16", *overrides, degrees=degrees)
    return step_seconds(config, build.ARGS, machine, microbatches)


def test_a_step_is_its_microbatches_and_one_update():
    one, four = (seconds(microbatches=count) for count in (1, 4))
    assert one.parts["update"] == pytest.approx(40 * (2 * BLOCK + OUTPUT) / 1e9)
    assert four.total - one.total == pytest.approx(3 * one.microbatch)
    assert one.total == pytest.approx(one.microbatch + one.parts["update"])
    assert one.hours(7200) == pytest.approx(2 * one.total)


def test_products_take_the_share_of_the_peak():
    half = dataclasses.replace(ONES, share=0.5)
    flops = flops_of(build.config(), build.ARGS)
    assert seconds().parts["products"] == pytest.approx(flops.products / 1e12)
    assert seconds(machine=half).parts["products"] == pytest.approx(2 * flops.products / 1e12)
    in_fp32 = seconds("--training.mixed_precision_param=float32")
    assert in_fp32.parts["products"] == pytest.approx(16 * flops.products / 1e12)


def test_transfers_hide_behind_what_is_computed_or_the_other_way_round():
    slow, fast = (dataclasses.replace(ONES, links=links) for links in (1e3, 1e15))
    weights = "weights and gradients"
    found = seconds(degrees=(1, 1, 2), machine=slow)
    assert found.microbatch == pytest.approx(found.parts[weights])
    found = seconds(degrees=(1, 1, 2), machine=fast)
    assert found.microbatch > 100 * found.parts[weights]
    trained = 2 * BLOCK + OUTPUT
    found = seconds(degrees=(1, 1, 2))  # gathered twice in bf16, reduced in fp32: a half is sent
    assert found.parts[weights] == pytest.approx((2 * 2 + 4) * trained / 2 / 1e9)
    keys = 2 * 2 * 6 * build.T / 2  # of two heads of 6, keys and values, of a layer
    assert found.parts["ring"] == pytest.approx(2 * keys * (2 * 2 + 2 * 4) / 1e9)
    kept = seconds("--parallelism.keep_weights_gathered", degrees=(1, 1, 2), microbatches=5)
    again = seconds(degrees=(1, 1, 2), microbatches=5)
    assert kept.parts[weights] == pytest.approx(again.parts[weights] / 2)


@pytest.mark.parametrize(
    ("ranks", "stride", "in_turn", "rate"),
    [
        (8, 1, False, 450e9),  # within a node
        (16, 1, False, 8 * 50e9),  # eight links between nodes
        (2, 8, False, 50e9),  # one rank a node
        (4, 4, False, 2 * 50e9),
        (16, 1, True, 50e9),  # one hop of a ring leaves the node
    ],
)
def test_a_collective_that_leaves_a_node_takes_the_slower_link(ranks, stride, in_turn, rate):
    machine = dataclasses.replace(MACHINES["h100"], share=1.0)
    assert _link(machine, ranks, stride, in_turn=in_turn) == rate


def test_bytes_are_those_that_were_counted():
    """Elementwise kernels, copies and the loss head: within a quarter for Llamas."""
    for row in json.loads((ROOT / "docs/benchmarks/counts.json").read_text())["counts"]:
        if row["method"] != "microbatch" or row["seq_len"] != 65536:
            continue
        config = load_config(counts.Case(row["model"], "microbatch", 1, 4).arguments(65536), 4)
        found = step_seconds(config, shape(config), ONES, 1).parts["memory"] * ONES.memory
        by_part = row["bytes_by_part"]
        names = ("elementwise, norms, RoPE", "copies", "loss head", "norm", "clip and add")
        assert found == pytest.approx(sum(by_part[name] for name in names), rel=0.25)


def test_its_error_against_the_paper_is_in_the_page():
    """The throughputs of LongShield's table 5."""
    _, ratios = roofline.beside_the_paper()
    assert len(ratios) == 22
    assert 0.5 < statistics.median(ratios) < 2
    page = " ".join((ROOT / "docs/benchmarks/README.md").read_text().split())
    found = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    assert f"over {len(ratios)} lines predicted over measured is {found}." in page
