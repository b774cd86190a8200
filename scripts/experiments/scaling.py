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

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_dp.privacy.clipping import clip, squared_norm
from torchtitan_dp.privacy.summation import FP32_SUM


@dataclass(frozen=True)
class Geometry:
    """Says how scales follow from earlier noised means.

    Args:
        eps_s: over sigma C / B, the standard deviation of a value's noise where scales are 1.
        beta: what each average of squares keeps of the one before.
        subtract_noise: whether v is without the noise's variance, which is known, and at least 0.
        by_row: whether v is the mean over a matrix's row, of a token or an output, or a vector;
            then it has less noise itself.
    """

    eps_s: float
    beta: float
    subtract_noise: bool = False
    by_row: bool = False


class ScaledMean:
    """Makes one noised mean after the other, in the geometry that those before it tell."""

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        geometry: Geometry | None,
        *,
        noise_std: float,
        max_grad_norm: float,
        batch: float,
    ) -> None:
        """
        Args:
            shapes: of the parameters, by name, in the order in which they lie in a gradient.
            geometry: None is DP-SGD's.
            noise_std: sigma C.
            batch: the expected batch size, fixed and public.
        """
        self._sizes = {name: shape.numel() for name, shape in shapes.items()}
        self._noise_std, self._max_grad_norm, self._batch = noise_std, max_grad_norm, batch
        self._geometry, self._shapes = geometry, shapes
        self._total_N = torch.zeros(sum(self._sizes.values()))
        self.scale_N: Tensor | None = None
        if geometry is not None:
            self._squares = Squares(len(self._total_N), geometry.beta)
            self.scale_N = torch.ones_like(self._total_N)

    def add(self, gradient_N: Tensor) -> bool:
        """Add a record's whole gradient; tell whether its scaled norm was above C."""
        return add_clipped_(
            self._total_N, gradient_N, self.scale_N, max_grad_norm=self._max_grad_norm
        )

    def take(self, key: bytes) -> dict[str, Tensor]:
        """Return this step's noised mean, by name, and begin the next step.

        Args:
            key: of this step, used once.
        """
        mean_N = noised_mean(
            self._total_N,
            self._sizes,
            self.scale_N,
            noise_std=self._noise_std,
            key=key,
            batch=self._batch,
        )
        self._total_N = torch.zeros_like(mean_N)
        if self._geometry is not None and self.scale_N is not None:
            noise = self._noise_std / self._batch
            excess_N = mean_N.square()
            if self._geometry.subtract_noise:
                excess_N -= (noise / self.scale_N).square()
            self._squares.add(excess_N)
            average_N = self._squares.average()
            if self._geometry.by_row:
                average_N = row_means(average_N, self._shapes)
            self.scale_N = scale_of(average_N.clamp(min=0.0), self._geometry.eps_s * noise)
        parts = split(mean_N, self._sizes)
        return {name: part.view(self._shapes[name]) for name, part in parts.items()}


class Squares:
    """Averages vectors with Adam's weights: fp32, shape (N,)."""

    def __init__(self, size: int, beta: float) -> None:
        self._sum_N, self._beta, self._weight = torch.zeros(size), beta, 0.0

    def add(self, squares_N: Tensor) -> None:
        self._sum_N.lerp_(squares_N, 1 - self._beta)
        self._weight += (1 - self._beta) * (1 - self._weight)

    def average(self) -> Tensor:
        """Return the average, in which weights add up to 1; there must be a first."""
        assert self._weight > 0
        return self._sum_N / self._weight


def row_means(whole_N: Tensor, shapes: dict[str, torch.Size]) -> Tensor:
    """Return the mean of each value's row: along the last dimension of its parameter."""
    parts = split(whole_N, {name: shape.numel() for name, shape in shapes.items()})
    rows = (part.view(shapes[name]).mean(-1, keepdim=True) for name, part in parts.items())
    expanded = (row.expand(shape) for row, shape in zip(rows, shapes.values(), strict=True))
    return torch.cat([row.flatten() for row in expanded])


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
