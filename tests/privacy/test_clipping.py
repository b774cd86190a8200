"""Clipping, one function at a time: what a sample adds is at most C, and exactly 0 if rejected."""

import math

import pytest
import torch
import torch._dynamo.testing

from torchtitan_dp.privacy import clipping
from torchtitan_dp.privacy.clipping import add_clipped_, clip, squared_norm

INF, NAN = math.inf, math.nan


def clipped(norms: list[float], valid: list[bool] | None = None, **options):
    squared_norm_B = torch.tensor(norms, dtype=torch.float64).square()
    valid_B = torch.tensor([True] * len(norms) if valid is None else valid)
    return clip(squared_norm_B, valid_B, **{"max_grad_norm": 0.5, **options})


def test_vanilla_scales_what_is_longer_than_C_and_nothing_else():
    factors = clipped([2.0, 0.5, 0.4, 1e-30, 0.0]).factor_B.tolist()
    assert factors == pytest.approx([0.25, 1.0, 1.0, 1.0, 1.0], rel=2e-5)


def test_automatic_is_C_over_the_norm_and_a_constant():
    factors = clipped([2.0, 0.49, 0.0], clip_function="automatic").factor_B.tolist()
    assert factors == pytest.approx([0.5 / 2.01, 1.0, 50.0], rel=2e-5)


def test_row18_and_22_padding_and_bad_norms_are_rejected():
    result = clipped([1.0, 1.0, NAN, INF, 1e300], [True, False, True, True, True])
    assert result.rejected_B.tolist() == [False, True, True, True, True]
    assert result.factor_B[1:].tolist() == [0.0] * 4


@pytest.mark.parametrize("factor", [0.0, NAN], ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3.0], ids=str)
def test_row22_what_is_rejected_leaves_no_trace(value, factor):
    """By selection: 0 x NaN is NaN."""
    total, before = torch.arange(5.0), torch.arange(5.0)
    add_clipped_(total, torch.full((5,), value), torch.tensor(factor), torch.tensor(True))
    assert torch.equal(total, before)


def test_row29_sums_add_up():
    total = torch.zeros(3)
    for _ in range(3):
        add_clipped_(total, torch.tensor([1.0, -2.0, 4.0]), torch.tensor(0.5), torch.tensor(False))
    assert total.tolist() == [1.5, -3.0, 6.0]


def test_row13_a_sum_in_bf16_is_refused():
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        total, gradient = (torch.zeros(3, dtype=dtype) for dtype in dtypes)
        with pytest.raises(AssertionError):
            add_clipped_(total, gradient, torch.tensor(1.0), torch.tensor(False))
    with pytest.raises(AssertionError):
        squared_norm(torch.zeros(3, dtype=torch.bfloat16))


def test_row13_a_thousand_small_adds_match_fp64():
    generator = torch.Generator().manual_seed(0)
    total, exact = torch.full((500,), 1.0), torch.full((500,), 1.0, dtype=torch.float64)
    for _ in range(1000):
        gradient = 1e-3 * torch.rand(500, generator=generator)
        exact += gradient.double()
        add_clipped_(total, gradient, torch.tensor(1.0), torch.tensor(False))
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1, 100, 4096, 3 * 4096 + 5])
def test_squared_norms_are_those_of_fp64_rows(size):
    gradient_BN = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    expected_B = gradient_BN.double().square().sum(-1)
    torch.testing.assert_close(squared_norm(gradient_BN), expected_B, rtol=1e-6, atol=0)


def lost_in_fp32(period: int, large: int, small_square: float) -> torch.Tensor:
    """`large` ones at each period's start; each of the other squares is lost when added to one."""
    gradient = torch.full((2**18 + 100,), math.sqrt(small_square))
    for i in range(large):
        gradient[i::period] = 1.0
    return gradient


@pytest.mark.parametrize("clip_function", ["vanilla", "automatic"])
@pytest.mark.parametrize("period", [2**k for k in range(4, 15)])
def test_row13_no_gradient_is_added_with_more_than_C(period, clip_function):
    """A square of less than half a unit in the last place of the sum so far adds nothing to it."""
    for large in (1, 2, 4, 8):
        for small_square in (5.9e-8, 3e-8, 2.9e-8, 1.2e-7, 1e-9):
            gradient = lost_in_fp32(period, large, small_square)
            exact = gradient.double().square().sum()
            assert squared_norm(gradient) >= exact * (1 - 1.6e-5)
            clipped = clip(
                squared_norm(gradient[None]),
                torch.tensor([True]),
                max_grad_norm=0.5,
                clip_function=clip_function,
            )
            total = torch.zeros_like(gradient)
            add_clipped_(total, gradient, clipped.factor_B[0], clipped.rejected_B[0])
            assert total.double().square().sum().sqrt() <= 0.5


def test_row13_any_order_of_summation_keeps_the_bound():
    """n non-negative terms lose at most a share n u, whatever the device's order: half in a norm.

    Then a square root, the factor and the product round once each.
    """
    u = 2.0**-24
    worst = clipping._ROW * u / 2 + 4 * u
    assert worst < 0.8 * (1 - clipping._SAFETY)


def test_row22_an_overflow_stays_visible():
    gradient = torch.zeros(10_000)
    gradient[5000] = 3e38
    gradient[5001] = 3e38
    assert not torch.isfinite(squared_norm(gradient)) or squared_norm(gradient) > 1e76
    gradient[5000] = INF
    assert not torch.isfinite(squared_norm(gradient))


@pytest.mark.parametrize("clip_function", ["vanilla", "automatic"])
@pytest.mark.parametrize("max_grad_norm", [1e-2, 1e-5, 1e-7, 1e-9])
def test_a_factor_that_fp32_rounds_coarsely_is_no_factor(max_grad_norm, clip_function):
    """Norms near fp32's limit over a small C: a subnormal factor may be off by half of itself."""
    for norm in (1e30, 1e36, 1.4e38, 2.9e38, 3.4e38):
        squared = torch.tensor([norm], dtype=torch.float64).square()
        clipped = clip(
            squared,
            torch.tensor([True]),
            max_grad_norm=max_grad_norm,
            clip_function=clip_function,
        )
        assert clipped.factor_B.double().item() * norm <= max_grad_norm
        assert clipped.rejected_B.item() == (clipped.factor_B.item() == 0)


def watched(shape, rejected=False):
    """What `add_clipped_` runs, and how many bytes of tensors that takes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((str(func), [x.numel() for x in args if isinstance(x, torch.Tensor)]))
            return func(*args, **(kwargs or {}))

    total, gradient = torch.zeros(shape), torch.ones(shape)
    with Watch():
        add_clipped_(total, gradient, torch.tensor(0.5), torch.tensor(rejected))
    return seen[2:]  # the two scalars come first


def test_a_sample_is_added_in_one_operation():
    """On CUDA that is one kernel: 12 bytes a value."""
    n = 2 * 70_001
    assert watched((2, 70_001)) == [("torchtitan_dp.add_scaled_.default", [n, n, 1, 1])]


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_views_are_added_to_with_one_rounding(threads, rejected):
    """In views that are not contiguous too; the gradient is kept."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 150_007, generator=generator)
    total_DN = whole[:, 3:100_003]
    gradient_DN = torch.randn(2, 100_000, generator=generator)
    factor, before = torch.tensor(0.3), gradient_DN.clone()
    expected = whole.clone()
    if not rejected:
        exact = total_DN.double() + before.double() * factor.double()
        expected[:, 3:100_003] = exact.float()
    torch.set_num_threads(threads)
    try:
        add_clipped_(total_DN, gradient_DN, factor, torch.tensor(rejected))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(whole, expected)
    assert torch.equal(gradient_DN, before)


@pytest.mark.thorough
@pytest.mark.slow
def test_clip_and_add_compiles_into_one_kernel():
    """As far as a CPU can tell: Inductor makes one kernel of it, which writes the sum alone."""
    metrics = pytest.importorskip("torch._inductor.metrics")
    metrics.reset()
    total, gradient = torch.zeros(1, 4_099), torch.full((1, 4_099), NAN)
    compiled = torch.compile(clipping._add_scaled, fullgraph=True, dynamic=True)
    compiled(total, gradient, torch.tensor(0.5), torch.tensor(True))
    assert total.abs().max() == 0
    assert metrics.generated_kernel_count == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offset", [0, 1])
def test_clip_and_add_on_cuda(offset):
    """The sum that the CPU has, in memory that is not aligned as well; NaN is left out."""
    gradient = torch.randn(2, 100_003, generator=torch.Generator().manual_seed(0))
    for rejected in (False, True):
        totals = [torch.ones(2, 100_010, device=device) for device in ("cpu", "cuda")]
        for total in totals:
            here = gradient.to(total.device)
            if rejected:
                here[0, 5] = NAN
            terms = torch.tensor(0.3, device=here.device), torch.tensor(rejected).to(here.device)
            add_clipped_(total[:, offset : offset + 100_003], here, *terms)
        torch.testing.assert_close(totals[1].cpu(), totals[0], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("in_rows", [True, False])
def test_layouts_of_many_methods_and_meshes_stay_within_dynamos_limit(in_rows):
    """A selfcheck meets them all in one process; as CUDA compiles it, but for the last backend."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    add = torch.compile(clipping._add_scaled, fullgraph=True, dynamic=True, backend=counter)
    factor, rejected = torch.tensor(0.5), torch.tensor(False)

    def add_all():
        for with_grad in (True, False):
            for shards in (1, 2, 4):
                for size in (1, 2, 48, 100):
                    for cut in (0, 3):
                        total = torch.zeros(shards, size + cut)[:, cut:]
                        gradient = torch.ones(shards, size + 2 * cut)[:, cut : cut + size]
                        with torch.set_grad_enabled(with_grad):
                            if in_rows:
                                clipping._add_rows(add, total, gradient, factor, rejected)
                            else:
                                add(total, gradient, factor, rejected)
                        assert torch.equal(total, torch.full_like(total, 0.5))

    if in_rows:
        add_all()
        assert counter.frame_count <= 6
    else:  # why they are rows
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            add_all()
