"""What a step is expected to take, and how long at a stated rate."""

import pytest

from scripts.benchmarking import counts
from tests import build
from tests.processes import forks
from torchtitan_dp.models.families import FAMILIES
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.cost import Weights, flops_of, step_cost, weights_of

# Values of one block of `build.ARGS`: queries, keys, values and output, then three of the
# feed-forward. Its D is 24, with 4 heads for queries and 2 for keys, and 64 hidden units.
BLOCK = 24 * 24 + 2 * 24 * 12 + 24 * 24 + 3 * 24 * 64
OUTPUT = build.VOCABULARY * 24


def cost(mode, tflops):
    config = build.config(f"--activation_checkpoint.mode={mode}", degrees=(1, 1, 2))
    return step_cost(config, shape(config), records=10, rate=0.4, tflops=tflops)


def test_no_time_without_a_rate():
    assert cost("none", None).seconds_per_step is None
    assert "stated" not in cost("none", None).describe()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_time_at_a_stated_rate(mode):
    found = cost(mode, 2.0)
    assert found.tokens_per_step == pytest.approx(4 * build.T, rel=1e-6)
    expected = found.flops_per_step / (2 * 2e12)  # two devices
    assert found.seconds_per_step == pytest.approx(expected)
    assert f"{expected:.3g} s" in found.describe()
    assert f"{found.flops_per_step:.3g} FLOPs ({found.flops_per_sample:.3g} a sample" in (
        found.describe()
    )


def test_a_step_is_of_its_samples():
    found = cost("full", None)
    assert found.flops_per_step == pytest.approx(4 * found.flops_per_sample)
    assert "recomputation included" in found.describe()
    assert "recomputation" not in cost("none", None).describe()


def test_weights_are_those_of_products():
    """The embedding is looked up, and a tied one is multiplied with as the output."""
    assert weights_of(build.ARGS) == (Weights(2 * BLOCK), Weights(OUTPUT))
    tied = FAMILIES["llama3"].flavors["1B"]
    assert tied.tie_embeddings
    assert weights_of(tied)[1] == Weights(128_256 * 2048)


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


def counted(mode, *overrides, n_layers=2, T=512):
    """FLOPs of the real step's microbatch, and what is predicted of it."""
    overrides = (f"--activation_checkpoint.mode={mode}", *overrides)
    case = counts.Case("debug", "microbatch", 1, 1, overrides=overrides, n_layers=n_layers)
    flops = forks.call(counts.count_here, case, [T])["microbatch"][T].flops
    products = flops["matrix products"] + flops["loss head"]
    assert sum(flops.values()) == products + flops["attention"]
    return products, flops["attention"], forks.call(predicted, case, T)


def predicted(case, T):
    from torchtitan_dp.config.load import load_config

    config = load_config(case.arguments(T), 1)
    args = shape(config)
    args.n_layers = case.n_layers
    blocks, output = weights_of(args)
    found = flops_of(config, args)
    return found, blocks, output, args


def test_the_real_step_takes_as_much():
    products, attention, (found, *_) = counted("none")
    assert found.products == products
    assert found.attention == attention / 2  # as if no mask were causal


def test_recomputation_takes_no_more():
    """It may stop before the last product, whose result no gradient needs."""
    products, attention, (found, blocks, *_) = counted("full")
    forward = 2 * 512 * blocks.all
    print(f"recomputed: {1 - (found.products - products) / forward:.3f} of the blocks' products")
    assert found.products - 0.25 * forward <= products <= found.products
    assert found.attention == attention / 2


def test_the_real_step_with_adapters_takes_as_much_but_for_the_first_block():
    """Below its adapters, nothing is trained: its queries, keys and values need no gradient of
    their input."""
    rank = 4
    products, attention, (found, blocks, output, args) = counted("none", f"--lora.rank={rank}")
    assert output.trained == 0 < blocks.trained < blocks.frozen
    keys = (args.n_kv_heads or args.n_heads) * args.head_size
    spared = 2 * 512 * args.dim * (args.dim + 2 * keys + 3 * rank)
    assert found.products == products + spared
    assert found.attention == attention / 2
