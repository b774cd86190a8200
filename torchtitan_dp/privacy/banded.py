"""Noise that is correlated over steps: banded matrix factorization (BandMF), with Toeplitz bands.

Step t of a chain adds w_t = ‖c‖ (C⁻¹ z)_t to its clipped sum, where z_1, z_2, … are independent
N(0, (σC)² I), and C is lower triangular with the column c = (c_0, …, c_{b-1}) along its diagonal
(Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", section 4 and appendix A).
The weights are the sum of the updates: noise of one step is taken back by later ones.

    c_k: the coefficients of (1 - x)^(-1/2), cut off after b of them (the square root of the matrix
    of prefix sums; Fichtenberger, Henzinger and Upadhyay 2023)

C⁻¹ is not banded, so a step needs the z of its whole chain. They are drawn again from their keys:
t draws at the t-th step of a chain, and no memory.

Guarantee
---------
What a chain releases is x + ‖c‖ C⁻¹ z, x the clipped sums, and follows from C x + ‖c‖ z. Where a
unit's draws lie at least b steps apart, they change rows of C x that do not overlap, each draw by
at most ‖c‖ times the clip norm in all: as many Gaussian mechanisms of noise multiplier σ as the
unit is drawn, adaptively (Denisov et al. 2022, theorem 2.1). A chain cut short only lacks rows. A
new chain has new z, so that draws of one unit before and after it are separate mechanisms too. So n
steps in a row are dominated by ⌈n / b⌉ Poisson-subsampled Gaussian mechanisms of rate b q, if each
unit is drawn with that rate at every b-th step and never otherwise (`sampling.groups_of`). C⁻¹ is
never cut off, which would be another mechanism, of another sensitivity.
"""

import math
from collections.abc import Sequence

from torchtitan_dp.privacy.keys import KeyStream, Secret

WeightedKey = tuple[bytes, float]


def column(bands: int) -> list[float]:
    """Return c_0, …, c_{b-1}.

    >>> column(4)
    [1.0, 0.5, 0.375, 0.3125]
    """
    found = [1.0]
    for k in range(1, bands):
        found.append(found[-1] * (2 * k - 1) / (2 * k))
    return found


def column_norm(bands: int) -> float:
    """Return ‖c‖, the sensitivity of C x to one draw of a unit, over the clip norm.

    >>> column_norm(1), round(column_norm(16), 4)
    (1.0, 1.3942)
    """
    return math.sqrt(math.fsum(value**2 for value in column(bands)))


def inverse(bands: int, steps: int) -> list[float]:
    """Return d_0, …, the first column of C⁻¹: w_t = ‖c‖ (d_0 z_t + d_1 z_{t-1} + …).

    >>> inverse(4, 5)
    [1.0, -0.5, -0.125, -0.0625, 0.234375]
    """
    c, found = column(bands), [1.0]
    for t in range(1, steps):
        found.append(-math.fsum(c[k] * found[t - k] for k in range(1, min(bands, t + 1))))
    return found[:steps]


def noise_in_step(bands: int, steps: int) -> float:
    """Return the root mean square, over a chain's steps, of a step's noise over σ C.

    >>> noise_in_step(1, 16)
    1.0
    """
    variances = [value**2 for value in inverse(bands, steps)]
    rows = math.fsum((steps - k) * variance for k, variance in enumerate(variances))
    return column_norm(bands) * math.sqrt(rows / steps)


def noise_in_sum(bands: int, steps: int) -> float:
    """Return the noise in the sum of a chain's steps over that of independent noise of one σ.

    >>> noise_in_sum(1, 16), round(noise_in_sum(16, 16), 3)
    (1.0, 0.486)
    """
    prefixes, total = [], 0.0
    for value in inverse(bands, steps):
        total += value
        prefixes.append(total**2)
    return column_norm(bands) * math.sqrt(math.fsum(prefixes) / steps)


class NoiseChain(Secret):
    """The noise keys of one chain: from a start, or a load, on."""

    __slots__ = ("__bands", "__keys", "__last", "__stream")

    def __init__(self, stream: KeyStream, bands: int) -> None:
        """
        Args:
            stream: of a root key that no other chain has.
            bands: b; 1 for independent noise.
        """
        self.__stream, self.__bands = stream, bands
        self.__keys: list[bytes] = []
        self.__last: int | None = None

    def take(self, step: int) -> Sequence[WeightedKey]:
        """Return the keys whose noise `step` adds, with the weight of each, its own first.

        Raises:
            RuntimeError: the step does not follow the one before, so that a unit's draws might be
                fewer than b rows apart, or was taken already.
        """
        self.__keys.append(self.__stream.take(step))
        last, self.__last = self.__last, step
        if self.__bands == 1:
            self.__keys, own = [], self.__keys
            return [(own[0], 1.0)]
        if last is not None and step != last + 1:
            raise RuntimeError(f"step {step} of a chain of correlated noise follows step {last}")
        weights = inverse(self.__bands, len(self.__keys))
        return list(zip(reversed(self.__keys), weights, strict=True))
