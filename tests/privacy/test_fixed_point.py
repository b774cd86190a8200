"""Fixed point: each step of the argument that one sample moves the noised integers by at most C."""

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from torchtitan_dp.privacy import fixed_point, secure_noise
from torchtitan_dp.privacy.clipping import clip, squared_norm
from torchtitan_dp.privacy.fixed_point import (
    add_clipped_units_,
    add_noise_units_,
    unit,
    units_to_fp32_,
)
from torchtitan_dp.privacy.noise import BLOCK

KEY = hashlib.sha256(b"test").digest()
NAN, INF = math.nan, math.inf
KEPT = torch.tensor(False)


def units_of(gradient, factor, h, rejected=False):
    """One sample's integers, shape (n,)."""
    total = torch.zeros(1, len(gradient), dtype=torch.int64)
    terms = torch.tensor(factor, dtype=torch.float32), torch.tensor(rejected)
    add_clipped_units_(total, gradient[None], *terms, unit=h)
    return total[0]


def clipped_units(gradient, C, clip_function="vanilla"):
    """One sample's integers, clipped as `ClippedSum` clips it."""
    clipped = clip(
        squared_norm(gradient[None]),
        torch.tensor([True]),
        max_grad_norm=C,
        clip_function=clip_function,
    )
    total = torch.zeros(1, len(gradient), dtype=torch.int64)
    add_clipped_units_(
        total, gradient[None], clipped.factor_B[0], clipped.rejected_B[0], unit=unit(C, 1)
    )
    return total[0]


@pytest.mark.parametrize("C", [1e-9, 0.3, 0.5, 1.0, 1.9999, 7.0, 1e9])
def test_row49_the_unit_is_a_public_power_of_two_with_room_on_both_sides(C):
    h = unit(C, 10**11)
    assert math.frexp(h)[0] == 0.5
    assert h == unit(C, 1)
    # Rounding every one of the most values there may be stays within what clipping leaves, ...
    assert math.sqrt(fixed_point.MAX_VALUES) * h / 2 <= 1.5e-7 * C
    # ... and twice the largest expected batch, all along one value, with noise beyond any draw,
    # within int64: no fp64 draw of numpy's exceeds 12.2, so a sum of four over 2 stays below 32.
    most = 2 * fixed_point.MAX_EXPECTED_BATCH * Fraction(C) / Fraction(h)
    most += 32 * Fraction(fixed_point.MAX_NOISE_MULTIPLIER) * Fraction(C) / Fraction(h)
    assert most < 2**63
    assert Fraction(C) / Fraction(h) * 2**22 >= 2**62  # not more room than is needed: h is small


def test_row49_more_values_than_the_unit_is_for_are_refused():
    with pytest.raises(AssertionError, match="100000000001 values"):
        unit(1.0, 10**11 + 1)


def test_row49_a_sample_is_rounded_once_to_the_nearest_unit():
    """Against exact fractions: no rounding of the product, ties to even."""
    generator = torch.Generator().manual_seed(3)
    h = 2.0**-40
    for factor in (1.0, 1 / 3, 1e-20, 0.99999):
        exponents = torch.randint(-45, 2, (500,), generator=generator).float()
        gradient = torch.randn(500, generator=generator) * torch.exp2(exponents)
        gradient[:4] = torch.tensor([2.5 * h, -1.5 * h, 0.5 * h, 1e-45])
        f = Fraction(torch.tensor(factor, dtype=torch.float32).item())
        exact = [Fraction(g) * f / Fraction(h) for g in gradient.tolist()]
        assert units_of(gradient, factor, h).tolist() == [round(e) for e in exact]


@pytest.mark.parametrize("clip_function", ["vanilla", "automatic"])
@pytest.mark.parametrize("C", [1e-9, 0.37, 1.0, 1e9])
def test_row49_no_sample_has_more_than_C(C, clip_function):
    """Whatever its norm, by exact integers: 1e-3 C to 1e18, and just about C."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-3, 0.99999, 0.999995, 1.0, 1.00001, 3.0, 1e5, 1e18 / C):
        for n in (1, 7, 5_000):
            gradient = torch.randn(n, generator=generator)
            gradient *= scale * C / gradient.norm()
            units = clipped_units(gradient, C, clip_function).tolist()
            squared = sum(k * k for k in units) * Fraction(unit(C, 1)) ** 2
            assert squared <= Fraction(C) ** 2
            if scale >= 1.0 and clip_function == "vanilla":
                assert squared >= (Fraction(C) * Fraction(1 - 3e-5)) ** 2


def test_row49_values_that_are_all_rounded_up_alike_stay_within_C():
    """65,536 equal values of a norm just above C: rounding does not cancel out among them."""
    C, n = 1.0, 2**16
    largest = 0.0
    for i in range(64):
        units = clipped_units(torch.full((n,), 2.0**-8 * (1 + i * 2.0**-23)), C)
        assert (units == units[0]).all()
        k = int(units[0])
        assert n * k * k * Fraction(unit(C, n)) ** 2 <= Fraction(C) ** 2
        largest = max(largest, math.sqrt(n) * k * unit(C, n))
    assert largest > C * (1 - 2e-5)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38, 1.0], ids=str)
def test_row22_what_is_rejected_leaves_no_trace(value):
    total = torch.arange(5)[None].clone()
    gradient = torch.full((1, 5), value)
    add_clipped_units_(total, gradient, torch.tensor(0.0), torch.tensor(True), unit=2.0**-40)
    assert total.tolist() == [[0, 1, 2, 3, 4]]


def test_row49_sums_are_those_of_python_in_any_order(monkeypatch):
    """Random samples of wild sizes, in random orders, in chunks that do not divide them."""
    monkeypatch.setattr(fixed_point, "_CPU_CHUNK", 7)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(5)
    h, n = 2.0**-40, 23
    for _ in range(20):
        sizes = torch.exp2(torch.randint(-44, 1, (40, 1, 1), generator=generator).float())
        gradients = torch.randn(40, 2, n, generator=generator) * sizes
        exact = [
            sum(round(Fraction(g) / Fraction(h)) for g in gradients[:, row, i].tolist())
            for row, i in itertools.product(range(2), range(n))
        ]
        for _ in range(3):
            total = torch.zeros(2, n, dtype=torch.int64)
            for sample in rng.permutation(40):
                add_clipped_units_(total, gradients[sample], torch.tensor(1.0), KEPT, unit=h)
            assert total.flatten().tolist() == exact


def test_row49_threads_change_nothing():
    gradient = torch.randn(2, 12 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    threads, totals = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            totals.append(torch.zeros_like(gradient, dtype=torch.int64))
            add_clipped_units_(totals[-1], gradient, torch.tensor(0.3), KEPT, unit=2.0**-40)
    finally:
        torch.set_num_threads(threads)
    expected = (gradient.double() * torch.tensor(0.3).double() * 2.0**40).round().long()
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], expected)


def test_row49_strided_accumulators_are_added_to_row_by_row():
    whole = torch.zeros(3, 10, dtype=torch.int64)
    gradient = torch.arange(12.0).view(4, 3).T  # strided too
    add_clipped_units_(whole[:, 5:9], gradient, torch.tensor(1.0), KEPT, unit=1.0)
    assert torch.equal(whole[:, 5:9], gradient.long())
    assert whole.sum() == gradient.sum()


def test_row13_other_types_are_refused():
    right = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3)
    for wrong in (
        (right[0].int(), right[1]),
        (right[1], right[1]),
        (right[0], right[1].bfloat16()),
        (right[0], right[1][:, :2]),
    ):
        with pytest.raises(AssertionError):
            add_clipped_units_(*wrong, torch.tensor(1.0), KEPT, unit=1.0)


# Noise.


def noised_units(flat, std, h=2.0**-40, start=0, name="w"):
    add_noise_units_(flat, unit=h, std=std, key=KEY, name=name, start=start)
    return flat


@pytest.mark.parametrize("start", [0, 3 * BLOCK - 100])
@pytest.mark.parametrize("std", [1e-12, 0.7, 2.0**15])
def test_row49_noise_is_the_secure_draws_rounded_to_units(std, start):
    """By numpy's generator at the documented key and counter: no grid and no fp32 in between."""
    h, block = 2.0**-40, start // BLOCK + 1
    key = int.from_bytes(secure_noise.cipher_key(KEY, "philox4x64-secure", "w"), "little")
    total = np.zeros(BLOCK)
    for i in range(4):
        philox = np.random.Philox(key=key, counter=(i << 128) + (block << 64))
        total += np.random.Generator(philox).standard_normal(BLOCK)
    expected = np.rint(total * (std / 2 / h)).astype(np.int64)
    units = noised_units(torch.zeros(3 * BLOCK, dtype=torch.int64), std, start=start)
    first = block * BLOCK - start
    assert np.array_equal(units[first : first + BLOCK].numpy(), expected)
    assert expected.std() * h == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("std", [1e-10, 1e-3, 1.0, 3e4])
def test_row49_the_sum_and_its_noise_add_up_as_integers(std):
    """So noising is rounding of the exactly noised sum, whatever the sum is: also far beyond what
    fp64 could hold to a unit."""
    generator = torch.Generator().manual_seed(2)
    total = torch.randint(-(2**61), 2**61, (50_001,), generator=generator)
    noise = noised_units(torch.zeros_like(total), std)
    assert torch.equal(noised_units(total.clone(), std), total + noise)
    assert (noise != 0).float().mean() > 0.9


@pytest.mark.parametrize("cuts", [[1], [7, 8, BLOCK - 1, BLOCK + 333]])
def test_row12_shards_fit_together_bit_by_bit(cuts):
    size = 2 * BLOCK + 1_001
    whole = noised_units(torch.zeros(size, dtype=torch.int64), 1.0)
    edges = [0, *cuts, size]
    parts = [
        noised_units(torch.zeros(b - a, dtype=torch.int64), 1.0, start=a)
        for a, b in itertools.pairwise(edges)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_mistakes_and_nothing_to_do():
    with pytest.raises(ValueError, match="pass the flattened int64 shard"):
        noised_units(torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match=r"privacy\.exact_sum"):
        noised_units(torch.zeros(4, dtype=torch.int64), 2.0**17)
    with pytest.raises(ValueError, match="std"):
        noised_units(torch.zeros(4, dtype=torch.int64), NAN)
    assert noised_units(torch.arange(4), 0.0).tolist() == [0, 1, 2, 3]
    assert noised_units(torch.zeros(0, dtype=torch.int64), 1.0).shape == (0,)


# And out again.


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 50])
@pytest.mark.parametrize("std", [0.0, 1e-8, 1.0, 3e4])
def test_what_comes_out_is_on_the_grid_in_the_memory_of_what_went_in(monkeypatch, std, size):
    monkeypatch.setattr(fixed_point, "_CHUNK", 7)
    h, generator = 2.0**-40, torch.Generator().manual_seed(2)
    units = torch.randint(-(2**50), 2**50, (size,), generator=generator)
    values = units.double() * h  # exact
    step = secure_noise.grid(std) if std else h
    expected = ((values / step).round() * step).float()
    out = units_to_fp32_(units, unit=h, std=std)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert out.untyped_storage().data_ptr() == units.untyped_storage().data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_has_the_units_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3, 2**20 + 33, generator=generator)
    gradient[1, 7] = NAN
    total = torch.randint(-(2**40), 2**40, gradient.shape, generator=generator)
    for rejected in (True, False):
        kept = gradient if rejected else gradient.nan_to_num(0.0)
        terms = torch.tensor(0.3), torch.tensor(rejected)
        on_cpu, on_cuda = total.clone(), total.cuda()
        add_clipped_units_(on_cpu, kept, *terms, unit=2.0**-40)
        add_clipped_units_(on_cuda, kept.cuda(), *(t.cuda() for t in terms), unit=2.0**-40)
        assert torch.equal(on_cuda.cpu(), on_cpu)
    noise = noised_units(torch.zeros(100_001, dtype=torch.int64, device="cuda"), 1.0)
    plain = torch.zeros(100_001, device="cuda")
    secure_noise.add_secure_gaussian_noise_(plain, std=1.0, key=KEY, name="w", start=0)
    out = units_to_fp32_(noise, unit=2.0**-40, std=1.0)
    torch.testing.assert_close(out, plain, rtol=0, atol=secure_noise.grid(1.0))


@pytest.mark.parametrize("bad", [0.5, NAN], ids=str)
def test_row49_every_device_adds_the_same_integers(bad):
    """What CUDA compiles, against what a CPU runs in chunks, of which the last is short."""
    gradient = torch.randn(200_001, generator=torch.Generator().manual_seed(0))
    gradient[7] = bad
    scale, rejected = torch.tensor(0.3).double() * 2.0**40, torch.tensor(bad != 0.5)
    here, there = (torch.full((200_001,), 3, dtype=torch.int64) for _ in range(2))
    fixed_point._add_units_on_cpu(here, gradient, scale, rejected)
    fixed_point._add_units(there, gradient, scale, rejected)
    assert torch.equal(here, there)
    assert torch.equal(here, torch.full_like(here, 3)) == bool(rejected)


@pytest.mark.slow
def test_layouts_of_many_methods_and_meshes_stay_within_dynamos_limit():
    """A selfcheck meets them all in one process; as CUDA compiles it, but for the last backend."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    add = torch.compile(fixed_point._add_units, fullgraph=True, dynamic=True, backend=counter)
    scale, rejected = torch.tensor(2.0, dtype=torch.float64), torch.tensor(False)
    for size in (1, 2, 48, 100):
        for cut in (0, 3):
            for stride in (1, 2):
                total = torch.zeros(size + cut, dtype=torch.int64)[cut:]
                gradient = torch.ones((size + cut) * stride)[cut * stride :: stride]
                with torch.no_grad():
                    fixed_point._add_in_chunks(add, 64, total, gradient, scale, rejected)
                assert torch.equal(total, torch.full_like(total, 2))
    assert counter.frame_count <= 6
