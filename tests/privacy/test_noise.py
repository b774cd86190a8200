"""Noise, plain and secure: right distribution and generators, one on every mesh, never repeated."""

import functools
import hashlib
import hmac
import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes.ranks import on_ranks
from torchtitan_dp.privacy import noise
from torchtitan_dp.privacy.banded import StepNoise
from torchtitan_dp.privacy.keys import RootKey

KEY = hashlib.sha256(b"test").digest()
SIZE = 2 * noise.BLOCK + 1_001  # odd, straddles blocks


def philox(key: bytes, name: str, start: int, count: int) -> torch.Tensor:
    return noise.standard_normal(key, name, start, count)


def threefry(key: bytes, name: str, start: int, count: int) -> torch.Tensor:
    """The accelerator's path, eagerly, on CPU."""
    flat = torch.zeros(count)
    noise._add_threefry(flat, 1.0, noise.threefry_key(key, name, "cpu"), start)
    return flat


def secure_philox(
    key: bytes, name: str, start: int, count: int, std: float = 1.0, value: float = 0.0
) -> torch.Tensor:
    flat = torch.full((count,), value)
    noise.add_secure_gaussian_noise_(flat, std=std, key=key, name=name, start=start)
    return flat


def secure_threefry(
    key: bytes, name: str, start: int, count: int, std: float = 1.0, value: float = 0.0
) -> torch.Tensor:
    flat = torch.full((count,), value)
    words = noise.threefry_key(key, name, "cpu", "threefry4x32-secure")
    add = functools.partial(noise._add_rounded, std=std)
    noise._add_threefry_sums(flat, add, words, start)
    return flat


both = pytest.mark.parametrize("draw", [philox, threefry])
every = pytest.mark.parametrize("draw", [philox, threefry, secure_philox, secure_threefry])
either = pytest.mark.parametrize(
    "add", [noise.add_gaussian_noise_, noise.add_secure_gaussian_noise_]
)


def flip(key: bytes, bit: int) -> bytes:
    return (int.from_bytes(key, "big") ^ (1 << bit)).to_bytes(len(key), "big")


# --- published vectors (Random123, tests/kat_vectors) ---------------------------------------------

THREEFRY4X32_20 = [
    ("0 0 0 0", "0 0 0 0", "9c6ca96a e17eae66 fc10ecd4 5256a7d8"),
    ("ffffffff " * 4, "ffffffff " * 4, "2a881696 57012287 f6c7446e a16a6732"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0 082efa98 ec4e6c89",
        "59cd1dbb b8879579 86b5d00c ac8b6d84",
    ),
]
PHILOX4X64_10 = [
    ("0 0 0 0", "0 0", "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
    (
        "ffffffffffffffff " * 4,
        "ffffffffffffffff " * 2,
        "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
    ),
    (
        "243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89",
        "452821e638d01377 be5466cf34e90c6c",
        "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
    ),
]


@pytest.mark.parametrize("counter, key, expected", THREEFRY4X32_20)
def test_threefry_matches_random123(counter, key, expected):
    def words(text: str) -> torch.Tensor:
        return torch.tensor([int(w, 16) for w in text.split()], dtype=torch.int64).to(torch.int32)

    out = noise.threefry4x32(tuple(words(counter)[:, None]), words(key))
    assert [int(word) & 0xFFFFFFFF for word in out] == [int(w, 16) for w in expected.split()]


@pytest.mark.parametrize("counter, key, expected", PHILOX4X64_10)
def test_numpy_philox_matches_random123(counter, key, expected):
    def number(text: str) -> int:  # little-endian in words
        return sum(int(word, 16) << (64 * i) for i, word in enumerate(text.split()))

    # numpy increments the counter before its first block
    generator = np.random.Philox(key=number(key), counter=(number(counter) - 1) % 2**256)
    assert [int(w) for w in generator.random_raw(4)] == [int(w, 16) for w in expected.split()]


def test_cpu_noise_is_numpys_philox_at_the_documented_key_and_counter():
    key = int.from_bytes(noise.cipher_key(KEY, "philox4x64", "w"), "little")
    for block in (0, 1, 5, 2**47):
        generator = np.random.Generator(np.random.Philox(key=key, counter=block << 64))
        expected = generator.standard_normal(noise.BLOCK, dtype=np.float32)
        assert np.array_equal(philox(KEY, "w", block * noise.BLOCK, noise.BLOCK), expected)


# --- distribution ---------------------------------------------------------------------------------


@both
def test_values_are_standard_normal(draw):
    values = draw(KEY, "w", 12_345, 1_000_001).double().numpy()
    chi2 = stats.chi2(len(values))
    assert chi2.ppf(1e-4) < (values**2).sum() < chi2.ppf(1 - 1e-4)
    assert abs(values.mean()) * np.sqrt(len(values)) < 4
    assert stats.kstest(values, "norm").pvalue > 1e-4
    tail = (abs(values) > 4).sum()  # 63.3 expected
    assert 35 < tail < 95


@pytest.mark.parametrize("std", [1e-3, 0.7, 250.0])
def test_std_scales_the_variance_and_the_gradient_stays(std):
    flat = torch.full((200_001,), 3.0 * std)
    noise.add_gaussian_noise_(flat, std=std, key=KEY, name="w", start=77)
    values = (flat.double() - 3.0 * std).numpy() / std
    chi2 = stats.chi2(len(values))
    assert chi2.ppf(1e-4) < (values**2).sum() < chi2.ppf(1 - 1e-4)


def test_threefry_normal_at_the_extreme_words(monkeypatch):
    """The map from words to values: exact in fp64, 9.4 sigma and more where u is least."""
    words = torch.tensor(
        [
            [0, 0, -1], [0, 0, 0x7FFFFFFF], [0, 1, 0x7FFFFFFF], [-1, -1, 0x40000000],
            [0x7FFFFFFF, -1, 5], [-(2**31), 0, 5], [12345, -7, 0], [-12345, 99, -(2**31)],
        ],
        dtype=torch.int32,
    )  # fmt: skip
    monkeypatch.setattr(noise, "threefry4x32", lambda c, k: (*words.T, words[:, 0]))
    values = noise.threefry_normal(torch.zeros(4, dtype=torch.int32), torch.tensor(0), len(words))

    def exact(w0: int, w1: int, w2: int) -> float:
        unsigned = (w0 % 2**32) * 2**32 + w1 % 2**32
        t = (min(unsigned, 2**64 - 1 - unsigned) + 0.5) / 2**64
        minus_log = -np.log1p(-t) if unsigned >= 2**63 else -np.log(t)
        value = np.sqrt(2 * minus_log) * np.sin(np.pi / 2 * ((w2 % 2**31) + 0.5) / 2**31)
        return -value if w2 < 0 else value

    np.testing.assert_allclose(values.numpy(), [exact(*map(int, row)) for row in words], rtol=1e-6)
    assert values[1] > 9.4
    assert values[0] < -9.4
    assert torch.isfinite(values).all()
    assert values.all()


# --- the same on every mesh -----------------------------------------------------------------------


@every
@pytest.mark.parametrize("cuts", [[1], [noise.BLOCK], [7, 8, noise.BLOCK - 1, noise.BLOCK + 333]])
def test_shards_fit_together_bit_by_bit(draw, cuts):
    whole = draw(KEY, "w", 0, SIZE)
    parts = [draw(KEY, "w", a, b - a) for a, b in itertools.pairwise([0, *cuts, SIZE])]
    assert torch.equal(torch.cat(parts), whole)


@both
@pytest.mark.parametrize("start", [2**53, 13 * 10**15, 2**62 - 100])
def test_positions_are_exact_however_far(draw, start):
    """Beyond what fp64 counts by one: projections of many units begin there."""
    whole = draw(KEY, "w", start, 1_001)
    assert len(torch.unique(whole)) > 990  # fp32 values may meet
    for cut in (1, 2, 501):
        assert torch.equal(draw(KEY, "w", start + cut, 1_001 - cut), whole[cut:])


@pytest.mark.parametrize("draw", [threefry, secure_threefry])
def test_threefry_chunks_fit_together(monkeypatch, draw):
    whole = draw(KEY, "w", 3, 10_001)
    monkeypatch.setattr(noise, "_CHUNK", 1_024)
    assert torch.equal(draw(KEY, "w", 3, 10_001), whole)


@pytest.mark.parametrize("draw", [philox, secure_philox])
def test_threads_change_nothing(draw):
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(draw(KEY, "w", 5, 13 * noise.BLOCK))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_the_default_generators_are_neither_used_nor_moved():
    torch.manual_seed(0)
    np.random.seed(0)
    untouched = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    first = [draw(KEY, "w", 0, 100) for draw in (philox, threefry)]
    assert untouched == (torch.rand(1), np.random.rand())
    torch.manual_seed(1)
    np.random.seed(1)
    second = [draw(KEY, "w", 0, 100) for draw in (philox, threefry)]
    assert torch.equal(torch.stack(first), torch.stack(second))


# --- never repeated -------------------------------------------------------------------------------


def streams(draw) -> list[torch.Tensor]:
    """Noise of two steps, three parameters, shards near and far: no two the same numbers."""
    stream = RootKey(KEY).stream("noise")
    keys = [stream.take(step) for step in (1, 2)]
    out = [draw(key, name, 0, SIZE) for key in keys for name in ("w", "w2", "layers.0.w")]
    out += [draw(keys[0], "w", start, 5_000) for start in (2**31, 2**32, 2**40, 2**62)]
    return out


@both
def test_no_run_of_four_values_occurs_twice(draw):
    runs = []
    for values in streams(draw):
        bits = np.lib.stride_tricks.sliding_window_view(values.numpy().view(np.uint32), 4)
        runs.append(np.ascontiguousarray(bits).view("V16").ravel())
    every = np.concatenate(runs)
    assert len(np.unique(every)) == len(every)


@every
def test_streams_are_uncorrelated(draw):
    """With those of the other generators and the same keys, too."""
    parts = [values[:5_000] for values in streams(draw)]
    others = {philox, threefry, secure_philox, secure_threefry} - {draw}
    parts += [other(RootKey(KEY).stream("noise").take(1), "w", 0, 5_000) for other in others]
    parts = torch.stack(parts).double()
    correlations = torch.corrcoef(parts) - torch.eye(len(parts))
    assert correlations.abs().max() * np.sqrt(5_000) < 4.5
    values = parts[0]
    for lag in (1, 2, 3, 4, 8):
        assert abs(torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1]) < 0.06


@both
def test_every_bit_of_key_name_and_position_changes_the_stream(draw):
    seen = {draw(KEY, "weight", 0, 4).numpy().tobytes()}
    expected = 1
    for bit in range(256):
        seen.add(draw(flip(KEY, bit), "weight", 0, 4).numpy().tobytes())
    expected += 256
    for bit in range(8 * len("weight")):
        if bit % 8 != 7:  # stays ASCII
            seen.add(draw(KEY, flip(b"weight", bit).decode(), 0, 4).numpy().tobytes())
            expected += 1
    for bit in range(45):
        seen.add(draw(KEY, "weight", 1 << bit, 4).numpy().tobytes())
        expected += 1
    assert len(seen) == expected


def test_all_128_bits_reach_both_generators(monkeypatch):
    """Behind the derivation: flipping a bit of the generator's own key changes its output."""
    base = bytes(range(16))
    for draw in (philox, threefry):
        seen = set()
        for key in [base, *(flip(base, bit) for bit in range(128))]:
            monkeypatch.setattr(noise, "cipher_key", lambda *_, key=key: key)
            seen.add(draw(KEY, "w", 0, 4).numpy().tobytes())
        assert len(seen) == 129


def test_row39_the_generators_keys_are_128_bits_of_hmac():
    """A shorter key, stretched, would pass every test that flips bits of the step's."""
    for generator in ("philox4x64", "threefry4x32"):
        expected = hmac.new(KEY, f"{generator}/w".encode(), hashlib.sha256).digest()[:16]
        assert noise.cipher_key(KEY, generator, "w") == expected
    words = noise.threefry_key(KEY, "w", "cpu")
    assert words.shape == (4,)
    assert words.numpy().tobytes() == noise.cipher_key(KEY, "threefry4x32", "w")


class Operators(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.add(func)
        return func(*args, **(kwargs or {}))


def test_row39_a_generators_key_is_not_copied_from_memory_that_is_freed():
    """Such a copy, without waiting, might read another key."""
    with Operators() as operators:
        noise.threefry_key(KEY, "w", "meta")
    assert operators.ran == {torch.ops.aten.full.default, torch.ops.aten.stack.default}


# --- mistakes -------------------------------------------------------------------------------------


@either
@pytest.mark.parametrize(
    "flat, std, said",
    [
        (torch.zeros(4, dtype=torch.bfloat16), 1.0, "needs a flat fp32 shard"),
        (torch.zeros(4).double(), 1.0, "needs a flat fp32 shard"),
        (torch.zeros(2, 2), 1.0, "needs a flat fp32 shard"),
        *((torch.zeros(4), std, "std") for std in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_only_flat_fp32_and_a_sensible_std_are_accepted(add, flat, std, said):
    with pytest.raises(ValueError, match=said):
        add(flat, std=std, key=KEY, name="w", start=0)


@either
def test_no_noise_and_empty_shards(add):
    flat = torch.full((5,), 0.1)
    add(flat, std=0.0, key=KEY, name="w", start=0)
    assert torch.equal(flat, torch.full((5,), 0.1))
    add(flat[:0], std=1.0, key=KEY, name="w", start=3)


@pytest.mark.cuda
def test_cuda_equals_the_cipher_on_cpu():
    on_cpu = threefry(KEY, "w", 2**32 - 5, 100_001)
    on_cuda = noise.standard_normal(KEY, "w", 2**32 - 5, 100_001, "cuda")
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=1e-5, atol=1e-6)
    assert torch.equal(noise.standard_normal(KEY, "w", 2**32 + 2, 999, "cuda"), on_cuda[7:1_006])
    on_cpu, secure = secure_threefry(KEY, "w", 2**32 - 5, 100_001), torch.zeros(100_001).cuda()
    noise.add_secure_gaussian_noise_(secure, std=1.0, key=KEY, name="w", start=2**32 - 5)
    torch.testing.assert_close(secure.cpu(), on_cpu, rtol=0, atol=noise.grid(1.0))


@either
def test_a_chunk_waits_for_no_copy_from_the_host(add, monkeypatch):
    """A number that becomes a tensor on a device is copied there, and the host waits: no operation
    shows it, so it is asked where tensors are made, on "meta", a device that holds nothing."""
    monkeypatch.setattr(noise, "_CHUNK", 100)
    flat = torch.zeros(700, device="meta")
    copied = []
    for name in ("tensor", "as_tensor", "asarray"):
        m = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, m=m, **k: copied.append(a) or m(*a, **k))
    add(flat, std=1.0, key=KEY, name="w", start=5)
    assert copied == []


# --- secure noise: four draws, one grid -----------------------------------------------------------


@pytest.mark.parametrize("draw", [secure_philox, secure_threefry])
@pytest.mark.parametrize("value", [0.0, 1e-7, 0.1, -4.0])
def test_what_comes_out_lies_on_the_grid_whatever_was_there(draw, value):
    """fp32's own grid would be finer near 0: its low bits would tell of the value."""
    out = draw(KEY, "w", 5, 50_001, 0.3, value).double()
    step = noise.grid(0.3)
    assert step == 2.0**-20
    assert torch.equal(out / step, (out / step).round())
    assert (out / step).remainder(2).mean() == pytest.approx(0.5, abs=0.02)  # no coarser


def test_a_value_is_the_sum_of_four_fp64_draws_added_in_fp64_and_rounded_once():
    key = int.from_bytes(noise.cipher_key(KEY, "philox4x64-secure", "w"), "little")
    for block in (0, 3):
        total = np.zeros(noise.BLOCK)
        for i in range(4):
            numpys = np.random.Philox(key=key, counter=(i << 128) + (block << 64))
            total += np.random.Generator(numpys).standard_normal(noise.BLOCK)
        step = noise.grid(0.7)
        expected = np.round((total * (0.7 / 2) + np.float32(0.1)) / step) * step
        out = secure_philox(KEY, "w", block * noise.BLOCK, noise.BLOCK, 0.7, 0.1)
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

    monkeypatch.setattr(noise, "threefry4x32", cipher)
    key, start = torch.zeros(4, dtype=torch.int32), torch.tensor(2**33 + 4)
    values = noise.threefry_normal_sum(key, start, len(words))
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


def update(degrees: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """The whole gradients that the inner optimizer sees, of a sum of zeros."""
    from tests import build
    from torchtitan_dp.gradients.optimizer import DPOptimizer

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
    dp.step(built.gradients.clipped_sum.take(), StepNoise(KEY))
    return seen


def test_the_optimizer_adds_it_to_each_shard():
    for name, gradient in on_ranks(2, update, (1, 1, 2))[0].items():
        expected = secure_philox(KEY, name, 0, gradient.numel(), std=0.5)
        assert torch.equal(gradient.flatten(), expected)
