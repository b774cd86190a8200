"""One step of scale-then-privatize on whole gradients in one process, as one flat fp32 vector.

Ganesh, McMahan & Thakurta 2025, "On Design Principles for Private Adaptive Optimizers", Algorithm
8: a record's gradient is multiplied, value by value, by s before it is clipped, and the noised mean
is divided by s again. s = 1 / (sqrt(v) + eps_s), where v averages the squares of the noised means
of earlier steps, as Adam does. Without scales (None) it is a step of DP-SGD.

Guarantee:
    One record moves the sum of scaled and clipped gradients by at most C, and N(0, (sigma C)^2) is
    added to each of its values. So with scales that follow from what earlier steps released, each
    step is DP-SGD's mechanism of a query that was chosen by earlier releases, and epsilon is the
    same (`privacy.accounting` counts such steps). Of sums in fp32, see `privacy.summation`.
"""

import torch
from torch import Tensor

from torchtitan_dp.privacy.clipping import clip, squared_norm
from torchtitan_dp.privacy.summation import FP32_SUM


class Squares:
    """Averages the squares of noised means, v, with Adam's weights: fp32, shape (N,)."""

    def __init__(self, size: int, *, beta: float, subtract_noise: bool) -> None:
        """
        Args:
            beta: what each average keeps of the one before.
            subtract_noise: whether the noise's variance is taken out of each square.
        """
        self._sum_N = torch.zeros(size)
        self._beta, self._weight, self._subtract_noise = beta, 0.0, subtract_noise

    def add(self, mean_N: Tensor, noise_variance_N: Tensor) -> None:
        """Take in a step's noised mean, and the variance of its noise, which is public."""
        squares_N = mean_N.square()
        if self._subtract_noise:
            squares_N = squares_N - noise_variance_N
        self._sum_N.lerp_(squares_N, 1 - self._beta)
        self._weight += (1 - self._beta) * (1 - self._weight)

    def average(self) -> Tensor:
        """Return v, at least 0; zeros before the first step."""
        return self._sum_N.clamp(min=0.0) / max(self._weight, 1e-30)


def scale_of(squares_N: Tensor, floor: float) -> Tensor:
    """Return s: proportional to 1 / (sqrt(v) + floor), and 1 / s^2 is 1 on average.

    So the noise is as long after the scales are undone as it is without them, C keeps its meaning,
    and a large floor, or no v yet, makes all scales 1. The factor is a function of v alone.
    """
    width_N = squares_N.double().sqrt() + floor
    return (width_N.square().mean().sqrt() / width_N).float()


def add_clipped_(
    total_N: Tensor, gradient_N: Tensor, scale_N: Tensor | None, *, max_grad_norm: float
) -> bool:
    """Scale a record's gradient, clip it to C and add it; tell whether its norm was above C."""
    if scale_N is not None:
        gradient_N = gradient_N * scale_N
    # Measured of what is added, after the scaling and its rounding.
    squares_B = squared_norm(gradient_N)[None]
    told = clip(squares_B, torch.tensor([True]), max_grad_norm=max_grad_norm)
    FP32_SUM.add_clipped_(total_N, gradient_N, told.factor_B[0], told.rejected_B[0])
    return bool(told.exceeds_B)


def noised_mean(
    total_N: Tensor,
    sizes: dict[str, int],
    scale_N: Tensor | None,
    *,
    noise_std: float,
    key: bytes,
    batch: float,
) -> Tensor:
    """Add noise to the sum, divide by the expected batch and undo the scales, in place.

    Args:
        sizes: of each parameter, by name, in the order in which they lie in the sum.
        noise_std: sigma C.
        key: of this step, used once.
    """
    for name, part in split(total_N, sizes).items():
        FP32_SUM.add_noise_(part, std=noise_std, key=key, name=name, start=0)
    total_N.div_(batch)
    return total_N if scale_N is None else total_N.div_(scale_N)


def split(whole_N: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return views of each parameter's part, by name."""
    return dict(zip(sizes, whole_N.split(list(sizes.values())), strict=True))
