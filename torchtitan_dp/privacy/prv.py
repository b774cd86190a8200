"""Numerical accounting: privacy loss random variables, composed by Fourier transform.

Guarantee
---------
`prv_epsilon` is the upper end of the error bar of Gopi, Lee & Wutschitz 2021 (Opacus'
discretization and composition), or infinite where these numbers cannot be trusted. The bar's
half-width is at most 0.01 where the grid can be that fine and else under epsilon / 200 (wider only
where epsilon is next to nothing), with delta_error = delta / 1000. It composes the direction "unit
present against absent"; see `accounting` for the other.
"""

import dataclasses
import functools
import logging
import math

import numpy as np
from opacus.accountants.analysis import prv

from torchtitan_dp.privacy.rdp import loss_bound, rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps, fft_noise

logger = logging.getLogger(__name__)

_PRV_EPS_ERROR = 0.01  # aimed at; relaxed to epsilon / 200 where the grid would grow too large
_PRV_MIN_EPS_ERROR = 1e-5  # and no finer, however small epsilon is
_PRV_MAX_GRID = 2**21
_PRV_MAX_LOSS = 600.0  # exp() of the privacy loss must stay finite


class _Truncated(prv.TruncatedPrivacyRandomVariable):  # type: ignore[misc]
    """Opacus' truncated privacy loss, with a mean precise enough to be multiplied by 100,000 steps.

    Opacus integrates the CDF, to 1e-7 at worst: 0.01 of epsilon after 100,000 steps.
    """

    def mean(self) -> float:
        """Integrate by Gauss-Legendre over the output x, in which the loss is smooth."""
        sigma, q = self._prv.noise_multiplier, self._prv.sample_rate

        def output(loss: float) -> float:
            ratio = (math.expm1(loss) + q) / q  # dN(1, sigma) / dN(0, sigma) at x
            return sigma**2 * math.log(ratio) + 0.5 if ratio > 0 else -math.inf

        low, high = max(output(self.t_min), -39 * sigma), min(output(self.t_max), 1 + 39 * sigma)
        nodes, weights = np.polynomial.legendre.leggauss(20)
        edges = np.linspace(low, high, 1001)
        half = np.diff(edges)[:, None] / 2
        x = edges[:-1, None] + half * (1 + nodes)
        absent = np.exp(-(x**2) / (2 * sigma**2))
        present = np.exp(-((x - 1) ** 2) / (2 * sigma**2))
        mass = half * weights * ((1 - q) * absent + q * present)
        loss = np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
        return float((mass * loss).sum() / mass.sum())


@functools.lru_cache(maxsize=1024)
def prv_epsilon(segments: tuple[GaussianSteps, ...], delta: float) -> float:
    """Compute PRV's upper bound; inf, with a log line, where its numbers cannot be trusted."""
    rough, best, last_error = rdp_epsilon(segments, delta), math.inf, math.inf
    for _ in range(4):  # `rough` may overestimate, and then so does the first error bar
        error = _prv_eps_error(segments, delta, max(rough / 250, _PRV_MIN_EPS_ERROR))
        if error is None or error >= last_error:
            break
        last_error = error
        try:
            with np.errstate(all="ignore"):  # log(0) and the like, which Opacus masks afterwards
                bound = _prv_compose(segments, delta, error)
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as why:
            logger.info("PRV accounting failed: %s", why)
            break
        if not math.isfinite(bound):
            break
        best = rough = min(best, bound)
        if error < best / 200 or error <= _PRV_MIN_EPS_ERROR:
            break
    if best == math.inf:
        logger.info("PRV is out of its depth at %s: RDP", segments)
    return best


def _prv_eps_error(
    segments: tuple[GaussianSteps, ...], delta: float, allowed: float
) -> float | None:
    """Choose the half-width of the error bar to ask for; None if it is out of reach."""
    if fft_noise(segments) > delta / 20:
        return None
    wanted = min(_PRV_EPS_ERROR, allowed)
    loss, mesh = _prv_domain(segments, delta, wanted)
    if loss > _PRV_MAX_LOSS:
        return None
    relaxed = wanted * max(1.0, 2 * loss / mesh / _PRV_MAX_GRID)
    return relaxed if relaxed <= max(allowed, _PRV_EPS_ERROR) else None


def _prv_domain(
    segments: tuple[GaussianSteps, ...], delta: float, eps_error: float
) -> tuple[float, float]:
    """Choose half-width and mesh of the grid of losses (Gopi et al., theorem 5.5, remark 5.6)."""
    delta_error, steps = delta / 1000, sum(segment.steps for segment in segments)
    one_step = (dataclasses.replace(segment, steps=1) for segment in segments)
    loss = eps_error + max(
        loss_bound(segments, delta_error / 4),
        *(loss_bound([step], delta_error / (8 * steps)) for step in one_step),
    )
    mesh = eps_error / math.sqrt(steps * math.log(12 / delta_error) / 2)
    return loss, mesh


def _prv_compose(segments: tuple[GaussianSteps, ...], delta: float, eps_error: float) -> float:
    loss, mesh = _prv_domain(segments, delta, eps_error)
    domain = prv.Domain.create_aligned(-loss, loss, mesh)
    losses = [prv.PoissonSubsampledGaussianPRV(s.sample_rate, s.noise_multiplier) for s in segments]
    one_step = [
        prv.discretize(_Truncated(loss, domain.t_min, domain.t_max), domain) for loss in losses
    ]
    total = prv.compose_heterogeneous(one_step, [segment.steps for segment in segments])
    _, _, upper = total.compute_epsilon(delta, delta / 1000 + fft_noise(segments), eps_error)
    return max(0.0, float(upper))
