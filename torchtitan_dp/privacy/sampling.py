"""Poisson sampling: which units take part in a step, with what choices, and on which rank.

Guarantee
---------
Every record (or other privacy unit) is in a step's draw with probability `sample_rate`,
independently of every other record and step: the number of records is drawn from Binomial(N, q),
and then that many distinct ones uniformly, which is the same distribution as N coins (in fp32 a
comparison of uniforms with a threshold is off by 19% at q = 1e-7). The draw is a function of (key,
N, q) alone, so every rank computes the same one, and `deal` neither drops nor repeats nor
truncates. This is the sampling that `accounting` assumes; both must be given the one q.

Assumptions: keys of different steps are independent and secret (`keys`), and numpy's
Philox4x64-10, to which 128 bits of the key arrive, is indistinguishable from random. Binomial's and
choice's float64 arithmetic is exact to about 1e-9 of the probabilities even at q = 1e-7. With
`secure`, draws are from SHAKE-256 and exact (`secure_draws`).
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_dp.privacy.secure_draws import SecureChoices, coins

Indices = npt.NDArray[np.int64]

_UNIT_BLOCKS_BITS = 128  # of the counter's 256


class Choices(Protocol):
    """The choices of one drawn unit: the methods of `numpy.random.Generator` that they take."""

    def random(self, size: int, /) -> Any: ...
    def integers(self, high: int, /) -> Any: ...
    def choice(self, high: int, /, size: int, replace: bool) -> Any: ...


def poisson_draw(
    key: bytes, population: int, sample_rate: float, *, secure: bool = False
) -> Indices:
    """Draw every one of `population` records independently with probability `sample_rate`.

    Args:
        key: the 32 bytes of this step, from `keys.KeyStream.take`; the first 16 are used, with
            `secure` all.
        population: N, the number of privacy units.
        secure: by a coin from SHAKE-256 for each.

    Returns:
        The indices drawn, rising: int64, shape (n,), n random and possibly 0.

    Raises:
        ValueError: `sample_rate` is outside [0, 1].

    >>> poisson_draw(bytes(32), population=5, sample_rate=1.0)
    array([0, 1, 2, 3, 4])
    """
    if not 0.0 <= sample_rate <= 1.0:
        raise ValueError(
            f"privacy.sample_rate = {sample_rate} is not a probability; choose one between 0 and 1"
        )
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


def groups_of(hashes: npt.NDArray[np.uint64], groups: int) -> list[Indices]:
    """Divide a population into groups that take turns, by the hash of each unit's name.

    A unit's group depends on its own name, and on their number, alone. Groups are of unequal sizes;
    the rate is what all of them have.

    Args:
        hashes: one for each unit, shape (N,).

    Returns:
        The units of each group, rising: int64.

    >>> [group.tolist() for group in groups_of(np.array([4, 7, 9, 2, 3], dtype=np.uint64), 2)]
    [[0, 3], [1, 2, 4]]
    """
    group = hashes % np.uint64(groups)
    return [np.flatnonzero(group == number) for number in range(groups)]


def choices(key: bytes, position: int, *, secure: bool = False) -> Choices:
    """Draw what one unit of one step takes: which of its records, and which window of it.

    The unit at `position` of the population has 2^128 blocks of the key's Philox stream to itself,
    so its choices are the same on every rank and mesh, whatever else is drawn. Each call begins
    anew, so that a choice can be repeated.

    Args:
        key: the 32 bytes of this step's "window" key; the first 16 are used, with `secure` all.
        secure: from SHAKE-256.

    >>> [int(choices(bytes(32), position=p).integers(100)) for p in (7, 7, 8)]
    [90, 90, 49]
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

    Args:
        draw: int64, shape (n,), the same on all ranks.
        ranks, rank: the number of data-parallel ranks, and this one.
        batch_size: samples a microbatch and rank (MBS).

    Returns:
        ceil(n / (ranks * batch_size)) arrays of shape (batch_size,), int64; -1 marks a slot
        without a record, whose sample must count as zero. Together the ranks hold each drawn
        index once. Every rank gets equally many, so that no collective waits for ever.

    The number of microbatches roughly reveals n, which is labelled not private, is never published,
    and depends on no record's content.

    >>> draw = np.array([3, 5, 8, 9, 20])
    >>> deal(draw, ranks=2, rank=0, batch_size=2)
    [array([3, 8]), array([20, -1])]
    >>> deal(draw, ranks=2, rank=1, batch_size=2)
    [array([5, 9]), array([-1, -1])]
    """
    assert 0 <= rank < ranks
    assert batch_size >= 1
    microbatches = -(-len(draw) // (ranks * batch_size))
    slots = np.full(microbatches * ranks * batch_size, -1, dtype=np.int64)
    slots[: len(draw)] = draw
    # ranks vary fastest, so that the padding of the last microbatch is spread evenly
    return list(slots.reshape(microbatches, batch_size, ranks)[:, :, rank].copy())
