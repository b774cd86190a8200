"""Secure noise: the right distribution, on a fixed grid, the same on every mesh, its own stream."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from tests.processes.ranks import on_ranks
from torchtitan_dp.privacy import noise, secure_noise
from torchtitan_dp.privacy.noise import BLOCK

KEY = hashlib.sha256(b"test").digest()
SIZE = 2 * BLOCK + 1_001  # odd, straddles blocks


def philox(
    key: bytes, name: str, start: int, count: int, std: float = 1.0, value: float = 0.0
) -> torch.Tensor:
    flat = torch.full((count,), value)
    secure_noise.add_secure_gaussian_noise_(flat, std=std, key=key, name=name, start=start)
    return flat


def threefry(
    key: bytes, name: str, start: int, count: int, std: float = 1.0, value: float = 0.0
) -> torch.Tensor:
    """The accelerator's path, eagerly, on CPU."""
    flat = torch.full((count,), value)
    words = bytearray(secure_noise.cipher_key(key, "threefry4x32-secure", name))
    add = functools.partial(secure_noise._add_rounded, std=std)
    secure_noise._add_threefry(flat, add, torch.frombuffer(words, dtype=torch.int32), start)
    return flat


both = pytest.mark.parametrize("draw", [philox, threefry])


@both
@pytest.mark.parametrize("std", [1e-3, 0.7, 250.0])
def test_values_are_normal(draw, std):
    values = draw(KEY, "w", 12_345, 400_001, std, 3 * std).double().numpy() / std - 3
    chi2 = stats.chi2(len(values))
    assert chi2.ppf(1e-4) < (values**2).sum() < chi2.ppf(1 - 1e-4)
    assert stats.kstest(values, "norm").pvalue > 1e-4


@both
@pytest.mark.parametrize("value", [0.0, 1e-7, 0.1, -4.0])
def test_what_comes_out_lies_on_the_grid_whatever_was_there(draw, value):
    """fp32's own grid would be finer near 0: its low bits would tell of the value."""
    out = draw(KEY, "w", 5, 50_001, 0.3, value).double()
    step = secure_noise.grid(0.3)
    assert step == 2.0**-20
    assert torch.equal(out / step, (out / step).round())
    assert (out / step).remainder(2).mean() == pytest.approx(0.5, abs=0.02)  # no coarser


@pytest.mark.parametrize("std", [1e-30, 1.0, 1.5, 2.0, 1e30])
def test_the_grid_is_a_power_of_two_far_below_the_noise(std):
    assert np.frexp(secure_noise.grid(std))[0] == 0.5
    assert 2.0**-19 < secure_noise.grid(std) / std <= 2.0**-18


def test_a_value_is_the_sum_of_four_fp64_draws_added_in_fp64_and_rounded_once():
    key = int.from_bytes(secure_noise.cipher_key(KEY, "philox4x64-secure", "w"), "little")
    for block in (0, 3):
        total = np.zeros(BLOCK)
        for i in range(4):
            philox_ = np.random.Philox(key=key, counter=(i << 128) + (block << 64))
            total += np.random.Generator(philox_).standard_normal(BLOCK)
        step = secure_noise.grid(0.7)
        expected = np.round((total * (0.7 / 2) + np.float32(0.1)) / step) * step
        out = philox(KEY, "w", block * BLOCK, BLOCK, 0.7, 0.1)
        assert np.array_equal(out.numpy(), expected.astype(np.float32))


def test_threefrys_draws_are_the_documented_map_of_all_four_words(monkeypatch):
    words = torch.tensor(
        [
            [0, 0, -1, -1], [0, 1, 0x7FFFFFFF, -1], [-1, -1, 0x40000000, 0],
            [0x7FFFFFFF, -1, 5, 7], [-(2**31), 0, 5, -9], [12345, -7, 0, 1],
            [-12345, 99, -(2**31), 0],
        ],
        dtype=torch.int32,
    )  # fmt: skip
    counters = []

    def cipher(counter, key):
        counters.append(torch.stack(counter).T.tolist())
        return words.T

    monkeypatch.setattr(secure_noise, "threefry4x32", cipher)
    key, start = torch.zeros(4, dtype=torch.int32), torch.tensor(2**33 + 4)
    values = secure_noise.threefry_normal_sum(key, start, len(words))
    assert values.dtype == torch.float64

    def exact(w0: int, w1: int, w2: int, w3: int) -> float:
        unsigned = (w0 % 2**32) * 2**32 + w1 % 2**32
        t = np.longdouble(min(unsigned, 2**64 - 1 - unsigned) + 0.5) / 2**64
        minus_log = -np.log1p(-t) if unsigned >= 2**63 else -np.log(t)
        turn = np.longdouble((w2 % 2**31) * 2**32 + w3 % 2**32) + np.longdouble(0.5)
        value = np.sqrt(2 * minus_log) * np.sin(turn * (np.longdouble(np.pi) / 2**64))
        return float(-value if w2 < 0 else value)

    expected = [4 * exact(*map(int, row)) for row in words]
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-13)
    assert counters == [[[4 + j, 2, i, 0] for j in range(len(words))] for i in range(4)]


@both
@pytest.mark.parametrize("cuts", [[1], [7, 8, BLOCK - 1, BLOCK + 333]])
def test_shards_fit_together_bit_by_bit(draw, cuts):
    whole = draw(KEY, "w", 0, SIZE)
    edges = [0, *cuts, SIZE]
    parts = [draw(KEY, "w", a, b - a) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


def test_neither_threads_nor_chunks_change_anything(monkeypatch):
    whole, threads = threefry(KEY, "w", 3, 10_001), torch.get_num_threads()
    monkeypatch.setattr(secure_noise, "_CHUNK", 1_024)
    assert torch.equal(threefry(KEY, "w", 3, 10_001), whole)
    try:
        torch.set_num_threads(1)
        one = philox(KEY, "w", 5, 13 * BLOCK)
        torch.set_num_threads(3)
        assert torch.equal(philox(KEY, "w", 5, 13 * BLOCK), one)
    finally:
        torch.set_num_threads(threads)


@both
def test_streams_are_distinct_and_uncorrelated(draw):
    other = hashlib.sha256(b"other").digest()
    asked = [(KEY, "w", 0), (KEY, "w2", 0), (other, "w", 0), (KEY, "w", 2**32), (KEY, "w", 2**40)]
    streams = [draw(key, name, start, 20_000) for key, name, start in asked]
    streams += [noise.standard_normal(KEY, "w", 0, 20_000)]  # the plain one, with the same key
    correlations = torch.corrcoef(torch.stack(streams).double()) - torch.eye(len(streams))
    assert correlations.abs().max() * np.sqrt(20_000) < 4.5


def test_mistakes_and_nothing_to_do():
    wide = torch.zeros(4).double()
    with pytest.raises(ValueError, match="pass the flattened fp32 shard"):
        secure_noise.add_secure_gaussian_noise_(wide, std=1.0, key=KEY, name="w", start=0)
    with pytest.raises(ValueError, match="std"):
        philox(KEY, "w", 0, 4, std=float("nan"))
    assert torch.equal(philox(KEY, "w", 0, 4, 0.0, 0.1), torch.full((4,), 0.1))
    assert philox(KEY, "w", 3, 0).shape == (0,)


def update(degrees: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """The whole gradients that the inner optimizer sees, of a sum of zeros."""
    from tests import build
    from torchtitan_dp.optimizer import DPOptimizer

    built = build.build(degrees)
    seen: dict[str, torch.Tensor] = {}

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            seen.update({n: p.grad.full_tensor() for n, p in built.parameters.items()})

    dp = DPOptimizer(
        Recorder(list(built.parameters.values()), lr=0.0),
        built.parameters,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        expected_batch_size=1,
        secure_noise=True,
    )
    dp.step(built.gradients.clipped_sum.take(), [(KEY, 1.0)])
    return seen


def test_the_optimizer_adds_it_to_each_shard():
    for name, gradient in on_ranks(2, update, (1, 1, 2))[0].items():
        expected = philox(KEY, name, 0, gradient.numel(), std=0.5)
        assert torch.equal(gradient.flatten(), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_the_cipher_on_cpu():
    on_cpu = threefry(KEY, "w", 2**32 - 5, 100_001)
    on_cuda = torch.zeros(100_001, device="cuda")
    secure_noise.add_secure_gaussian_noise_(on_cuda, std=1.0, key=KEY, name="w", start=2**32 - 5)
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=0, atol=secure_noise.grid(1.0))
