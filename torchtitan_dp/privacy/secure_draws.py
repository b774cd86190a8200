"""Draws from a cryptographic generator: SHAKE-256, whose output is a function of a secret key.

With `privacy.secure_noise` these are the draws of units, of their records and windows, and of the
projections of estimated norms; Philox and Threefry then make noise alone. A draw is a function of
(key of the step, purpose, position), the same on all ranks, as theirs are.

Guarantee
---------
If SHAKE-256 (FIPS 202) with a secret 256-bit key as prefix is a pseudo-random function, as the
sponge construction has it, words of distinct (key, purpose, position) are indistinguishable from
independent uniform ones. A coin of 64 bits is heads with probability floor(q 2^64) / 2^64: at most
q, and less by at most 2^-64. `integers` and `choice` are exactly uniform, by rejection.

Cost: 8 bytes a unit and step, at some 0.5 GB/s on one core: 16 ms for a million units.
"""

import hashlib

import numpy as np
import numpy.typing as npt

_CHUNK = 2**21  # coins of one output: bounds its memory
_WORD = 2**64


def uint64s(key: bytes, purpose: str, position: int, count: int) -> npt.NDArray[np.uint64]:
    """Return uniform words, uint64 (count,); fewer are the beginning of more."""
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
        """
        Args:
            key: the 32 bytes of this step's "window" key.
            position: the unit's, in the population.
        """
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


def unit_normals(key: bytes, name: str, position: int, count: int) -> npt.NDArray[np.float32]:
    """Draw standard normals, fp32 (count,), by Box and Muller's method in fp64."""
    half = -(-count // 2)
    purpose = f"normal/{hashlib.sha256(name.encode()).hexdigest()}"
    words = uint64s(key, purpose, position, 2 * half)
    u = (words >> np.uint64(11)) * 2.0**-53 + 2.0**-54  # within (0, 1)
    radius, angle = np.sqrt(-2 * np.log(u[:half])), 2 * np.pi * u[half:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[:count].astype(np.float32)
