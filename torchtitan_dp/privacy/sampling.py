"""Sampling: which units take part in a step, with what choices, and on which rank.

Guarantee:
    - Every unit is in a step's draw with probability `sample_rate`, independently of every other
      unit and step: their number is drawn from Binomial(N, q), then that many distinct ones
      uniformly. The draw is a function of (key, N, q) alone, so every rank computes the same one,
      and `deal` neither drops nor repeats nor truncates.
    - A unit's step in a round of t steps (`allocate`) is a function of the round's key and its own
      position, and has a probability of 1 / t, up to t 2^-64 of that.
    - With `privacy.secure_noise` all draws but noise are from SHAKE-256: words of distinct (key,
      purpose, position) are indistinguishable from independent uniform ones, if SHAKE-256 with a
      secret key as prefix is a pseudo-random function. A coin of 64 bits is heads with probability
      floor(q 2^64) / 2^64; `integers` and `choice` are exactly uniform, by rejection.
    - Assumptions: keys of different steps are independent and secret (`keys`), and numpy's
      Philox4x64-10 with 128 bits of the key is indistinguishable from random. Binomial's and
      choice's float64 arithmetic is exact to about 1e-9 of the probabilities even at q = 1e-7.
"""

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_UNIT_BLOCKS_BITS = 128  # of the counter's 256
_CHUNK = 2**21  # coins of one output: bounds its memory
_WORD = 2**64


def poisson_draw(
    key: bytes, population: int, sample_rate: float, *, secure: bool = False
) -> Indices:
    """Draw every one of `population` records independently with probability `sample_rate`.

    Args:
        key: the 32 bytes of this step, from `keys.KeyStream.take`; the first 16 are used, with
            `secure` all.
        secure: by a coin from SHAKE-256 for each.

    Returns:
        The indices drawn, rising: int64, shape (n,), n random and possibly 0.
    """
    if not 0.0 <= sample_rate <= 1.0:
        raise ValueError(f"privacy.sample_rate = {sample_rate} is no probability from 0 to 1")
    assert len(key) == 32, "the key of a step has 32 bytes"
    assert population >= 0
    if secure:
        return coins(key, population, sample_rate)
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    count = generator.binomial(population, float(sample_rate))
    if count == 0:  # also keeps `choice` from an empty population
        return np.empty(0, dtype=np.int64)
    drawn = generator.choice(population, size=count, replace=False, shuffle=False)
    return np.sort(drawn).astype(np.int64, copy=False)


def allocate(key: bytes, population: int, steps: int) -> Indices:
    """Draw, from the 32 bytes of a round, the one of its `steps` at which each unit takes part,
    from 0: int64, shape (population,), from SHAKE-256."""
    words = [
        uint64s(key, "allocation", chunk, min(_CHUNK, population - first))
        for chunk, first in enumerate(range(0, population, _CHUNK))
    ]
    return (np.concatenate([np.empty(0, np.uint64), *words]) % np.uint64(steps)).astype(np.int64)


def groups_of(hashes: npt.NDArray[np.uint64], groups: int) -> list[Indices]:
    """Divide a population into groups that take turns, by the hash of each unit's name, (N,).

    A unit's group depends on its own name, and on their number, alone. Groups are of unequal sizes;
    the rate is what all of them have.
    """
    group = hashes % np.uint64(groups)
    return [np.flatnonzero(group == number) for number in range(groups)]


def choices(key: bytes, position: int, *, secure: bool = False) -> "Choices":
    """Draw what one unit of one step takes: which of its records, and which window of it.

    The unit at `position` of the population has 2^128 blocks of the Philox stream of the step's
    "window" key to itself, so its choices are the same on every rank and mesh, for any
    other draws; with `secure` they are from SHAKE-256. Each call begins anew, so that a choice can
    be repeated.
    """
    assert len(key) == 32, "the key of a step has 32 bytes"
    assert position >= 0
    if secure:
        return SecureChoices(key, position)
    philox = np.random.Philox(
        key=int.from_bytes(key[:16], "little"), counter=position << _UNIT_BLOCKS_BITS
    )
    return np.random.Generator(philox)


def deal(draw: Indices, *, ranks: int, rank: int, batch_size: int) -> list[Indices]:
    """Cut one step's draw into the microbatches of one data-parallel rank.

    The number of microbatches roughly reveals n, which is labelled not private, is never published,
    and depends on no record's content.

    Args:
        draw: int64, shape (n,), the same on all ranks.
        batch_size: samples a microbatch and rank (MBS).

    Returns:
        ceil(n / (ranks * batch_size)) arrays of shape (batch_size,), int64; -1 marks a slot
        without a record, whose sample must count as zero. Together the ranks hold each drawn
        index once. Every rank gets equally many, so that no collective waits for ever.
    """
    assert 0 <= rank < ranks
    assert batch_size >= 1
    microbatches = -(-len(draw) // (ranks * batch_size))
    slots = np.full(microbatches * ranks * batch_size, -1, dtype=np.int64)
    slots[: len(draw)] = draw
    # ranks vary fastest, so that the padding of the last microbatch is spread evenly
    return list(slots.reshape(microbatches, batch_size, ranks)[:, :, rank].copy())


# --- SHAKE-256 ------------------------------------------------------------------------------------


def uint64s(key: bytes, purpose: str, position: int, count: int) -> npt.NDArray[np.uint64]:
    """Return uniform words, uint64 (count,), of SHAKE-256; fewer are the beginning of more."""
    assert len(key) == 32, "the key of a step has 32 bytes"
    name = purpose.encode()
    assert len(name) < 256
    domain = key + bytes([len(name)]) + name + position.to_bytes(16, "little")
    return np.frombuffer(hashlib.shake_256(domain).digest(8 * count), dtype="<u8")


def coins(key: bytes, count: int, probability: float) -> npt.NDArray[np.int64]:
    """Toss coins, one a unit, and return the numbers of those that are heads, rising."""
    threshold = int(probability * _WORD)  # exact: a shift of the exponent, rounded down
    if threshold == _WORD:
        return np.arange(count)
    heads = []
    for chunk, first in enumerate(range(0, count, _CHUNK)):
        words = uint64s(key, "sampling", chunk, min(_CHUNK, count - first))
        heads.append(first + np.flatnonzero(words < np.uint64(threshold)))
    return np.concatenate([np.empty(0, dtype=np.int64), *heads])


class SecureChoices:
    """The choices of one drawn unit: a few methods of `numpy.random.Generator`."""

    def __init__(self, key: bytes, position: int) -> None:
        self._key, self._position, self._used = key, position, 0

    def random(self, size: int) -> npt.NDArray[np.float64]:
        """Draw multiples of 2^-53, uniform in [0, 1): fp64 (size,)."""
        return np.asarray((self._words(size) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def integers(self, high: int) -> int:
        """Draw an integer, uniform from 0 to high - 1."""
        assert 0 < high < _WORD
        while (word := int(self._words(1)[0])) >= _WORD - _WORD % high:
            continue
        return word % high

    def choice(self, high: int, size: int, replace: bool = False) -> npt.NDArray[np.int64]:
        """Draw `size` different integers from 0 to high - 1, in a random order: int64 (size,)."""
        assert not replace
        moved: dict[int, int] = {}  # the first steps of a Fisher-Yates shuffle
        drawn = []
        for place in range(size):
            other = place + self.integers(high - place)
            drawn.append(moved.get(other, other))
            moved[other] = moved.get(place, place)
        return np.array(drawn, dtype=np.int64)

    def _words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return the next words; few are used, so that the earlier ones may be made again."""
        first, self._used = self._used, self._used + count
        return uint64s(self._key, "choice", self._position, self._used)[first:]


Choices = np.random.Generator | SecureChoices
"""The choices of one drawn unit."""


def unit_normals(key: bytes, name: str, position: int, count: int) -> npt.NDArray[np.float32]:
    """Draw standard normals, fp32 (count,), by Box and Muller's method in fp64."""
    half = -(-count // 2)
    words = uint64s(key, f"normal/{hashlib.sha256(name.encode()).hexdigest()}", position, 2 * half)
    u = (words >> np.uint64(11)) * 2.0**-53 + 2.0**-54  # within (0, 1)
    radius, angle = np.sqrt(-2 * np.log(u[:half])), 2 * np.pi * u[half:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[:count].astype(np.float32)
