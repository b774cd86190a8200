"""What a step is expected to take."""

import pytest

from scripts.benchmarking import counts
from tests import build
from tests.processes import forks
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.flavors import flavor
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.cost import Weights, flops_of, step_cost, weights_of

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
    said = found.describe()
    assert f"{found.flops_per_step:.3g} FLOPs ({found.flops_per_sample:.3g} a sample" in said
    assert ("recomputation included" in said) == (mode == "full")


def test_weights_are_those_of_products():
    """The embedding is looked up, and a tied one is multiplied with as the output."""
    assert weights_of(build.ARGS) == (Weights(2 * BLOCK, 2 * BLOCK), Weights(OUTPUT, OUTPUT))
    tied = flavor("1B")
    assert tied.tie_embeddings
    assert weights_of(tied)[1].trained == weights_of(tied)[1].all == 128_256 * 2048


@pytest.mark.parametrize("mode", ["none", "full"])
def test_flops_of_a_sample_by_hand(mode):
    found = flops_of(build.config(f"--activation_checkpoint.mode={mode}"), build.ARGS)
    T, again = build.T, 1 if mode == "full" else 0
    # Two a value forward, four backward; the loss head is never recomputed.
    assert found.products == T * ((6 + 2 * again) * 2 * BLOCK + 6 * OUTPUT)
    # Scores and values, 4 T^2 D, of which a causal mask leaves half; in backward scores again,
    # and the gradients of values, probabilities, queries and keys: five products for two.
    forward = 2 * (4 * T**2 // 2 * 24)
    assert found.attention == forward * (1 + again) + forward * 5 / 2
    assert found.total == found.products + found.attention


T, RANK = 512, 4


def predicted(case):
    config = load_config(case.arguments(T), 1)
    args = shape(config)
    args.n_layers = case.n_layers
    return flops_of(config, args), weights_of(args), args


@pytest.mark.parametrize(
    ("mode", "more"), [("none", ()), ("full", ()), ("none", (f"--lora.rank={RANK}",))]
)
def test_the_real_step_takes_as_much(mode, more):
    """Recomputation may stop before the last product, whose result no gradient needs. Below its
    adapters nothing is trained: the first block's queries, keys and values need no gradient of
    their input."""
    overrides = (f"--activation_checkpoint.mode={mode}", *more)
    case = counts.Case("debug", "microbatch", 1, 1, overrides=overrides, n_layers=2)
    flops = forks.call(counts.count_here, case, [T])["microbatch"][T].flops
    products, attention = flops["matrix products"] + flops["loss head"], flops["attention"]
    assert sum(flops.values()) == products + attention
    found, (blocks, output), args = forks.call(predicted, case)
    assert found.attention == attention / 2  # as if no mask were causal
    if mode == "full":
        assert found.products - 0.25 * 2 * T * blocks.all <= products <= found.products
    elif more:
        assert output.trained == 0 < 2 * blocks.trained < blocks.all
        keys = args.n_kv_heads * args.head_dim
        spared = 2 * T * args.dim * (args.dim + 2 * keys + 3 * RANK)
        assert found.products == products + spared
    else:
        assert found.products == products
