"""Clipping: from per-sample gradients to a sum in which each sample counts at most C.

Flat clipping has one group of parameters (Abadi et al. 2016). Group-wise clipping (McMahan et al.
2018; DP-ZeRO, Bu et al. 2023, section 2.1) needs no norm of the whole gradient, so that a group can
be clipped as soon as backward has reached it.

Guarantee:
    - Let g_i be the whole gradient of sample i, and s_i its squared norm over every shard. The sum
      built by `add_clipped_` with the factors of `clip` changes by at most C in l2 norm when one
      sample is replaced by an empty one, for any content. Assumes that s_i is the same
      on every rank that holds a shard of g_i (one all-reduce over those ranks, before `clip`), and
      that g_i depends on sample i alone.
    - `ClipPolicy` alone has C, and alone decides factors. Each parameter is in exactly one of its M
      groups, by its name alone. A group's part of a sample has a norm of at most C / sqrt(M), so
      the whole one of at most C: sensitivity and epsilon are those of flat clipping.
    - The sum is in fp32, so that one record moves the sum of n samples on one rank by at most
      C (1 + fp32_sum_excess(n)): negligible for a few hundred samples, and far from the bound
      unless thousands of gradients and their order are made for it. `privacy.json` has the
      number.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchtitan_dp.privacy.kernels import compile_kernel
from torchtitan_dp.privacy.settings import Privacy

ClipFunction = Literal["vanilla", "automatic"]

# Norms carry fp32 rounding, by which they can be short; scaling to a little less than C covers it.
_SAFETY = 1 - 1e-5
# Of automatic clipping: keeps small gradients small (Bu et al. 2023, "Automatic Clipping").
_STABILITY = 0.01
# Elements whose squares are summed in fp32 before fp64 takes over. Of n terms that are not negative
# a sum in any order, so on any device, loses at most a share of n u (u = 2^-24: Higham 2002,
# "Accuracy and Stability of Numerical Algorithms", section 4.2), a norm half of that. For 256 this
# is 7.7e-6; the square root, the factor (a normal number, else the sample is rejected) and the
# product add u each: 7.9e-6 < 1 - _SAFETY.
# (1.2e-4 for 4096: of squares just below u, summed after a one, none counts.) Squares below the
# smallest fp32 number are lost too, in sum less than 1e-9 C^2 for C >= 1e-9 and 1e10 elements.
_ROW = 256
_ROUNDING = 2.0**-24  # of fp32: an addition's result is off by at most this share


class Clip(NamedTuple):
    """How each sample of a microbatch enters the sum: (B,), or (G, B) for G groups."""

    factor_B: Tensor  # fp32: what the gradient is multiplied by
    rejected_B: Tensor  # bool: contributes exactly 0 (padding, NaN, Inf, norms near overflow)
    norm_B: Tensor  # fp64: norms before clipping; private, for metrics only
    exceeds_B: Tensor  # bool: the norm is above its bound; private, for metrics only

    def over_groups(self) -> "Clip":
        """Sum up (G, B) to whole samples, (B,), for metrics."""
        if len(self.norm_B) == 1:
            return Clip(*(field[0] for field in self))
        return Clip(
            self.factor_B.amin(0),
            self.rejected_B.any(0),
            self.norm_B.square().sum(0).sqrt(),
            self.exceeds_B.any(0),
        )


def squared_norm(gradient: Tensor) -> Tensor:
    """Return the squared l2 norms along the last dimension of an fp32 tensor, as fp64.

    Rows of 256 are summed in fp32, and their sums in fp64: as fast as one fp32 norm, which on CPU
    loses 0.5% at 134M elements. The result is at most a share of 1.6e-5 below the exact one,
    for any values. NaN, Inf and overflow stay visible as NaN or Inf.
    """
    assert gradient.dtype == torch.float32, gradient.dtype
    in_rows = gradient.shape[-1] // _ROW * _ROW
    norms = torch.linalg.vector_norm(gradient[..., :in_rows].unflatten(-1, (-1, _ROW)), dim=-1)
    body = torch.linalg.vector_norm(norms, dim=-1, dtype=torch.float64).square()
    return body + torch.linalg.vector_norm(gradient[..., in_rows:], dim=-1).double().square()


def clip(
    squared_norm_B: Tensor,
    valid_B: Tensor,
    *,
    max_grad_norm: float | Tensor,
    clip_function: ClipFunction = "vanilla",
) -> Clip:
    """Compute the factor that each sample's gradient is multiplied by.

    Guarantee:
        - factor x |g| <= C for every sample, if `squared_norm_B` is the exact |g|^2 or above it: an
          error of 1.6e-5 below (`squared_norm`) is inside the factor's own margin.
        - A sample that is padding, or whose norm is NaN, Inf or overflows, has factor 0 and is in
          `rejected`.
        - No control flow depends on a norm: nothing is read back from the device.

    Args:
        squared_norm_B: fp64, over all shards (already all-reduced): (B,), or (G, B) for groups.
        valid_B: bool; False for padding samples.
        max_grad_norm: C > 0; of groups, the bound of each: fp64 (G, 1).
        clip_function: "vanilla" is min(1, C / |g|) (Abadi et al. 2016; LongShield, Algorithm 1),
            "automatic" is C / (|g| + 0.01) (Bu et al. 2023).

    Returns:
        factor fp32, rejected bool, norm fp64, and whether the norm exceeds C; each of the shape of
        `squared_norm_B`.
    """
    norm_B = squared_norm_B.sqrt()
    bound = max_grad_norm * _SAFETY
    if clip_function == "vanilla":
        scale_B = (norm_B.reciprocal() * bound).clamp(max=1.0)
    else:
        assert clip_function == "automatic", clip_function
        scale_B = (norm_B + _STABILITY).reciprocal() * bound
    # Below the smallest normal number a factor is rounded so coarsely that the norm could exceed C.
    is_fine_B = scale_B >= torch.finfo(torch.float32).tiny
    rejected_B = ~(torch.isfinite(squared_norm_B) & valid_B & is_fine_B)
    factor_B = scale_B.masked_fill(rejected_B, 0.0).float()
    return Clip(factor_B, rejected_B, norm_B, norm_B > max_grad_norm)


@dataclass(frozen=True)
class ClipPolicy:
    """How samples' gradients are clipped: in which groups, to which bounds, by which function."""

    members: tuple[tuple[str, ...], ...]  # canonical names of each group's parameters
    max_grad_norm: float  # C: of a whole gradient
    clip_function: ClipFunction = "vanilla"

    @property
    def bounds(self) -> tuple[float, ...]:
        """The norm that each group's part is clipped to; their squares add up to C^2."""
        return (self.max_grad_norm / math.sqrt(len(self.members)),) * len(self.members)

    @property
    def is_flat(self) -> bool:
        """Whether all parameters are one group."""
        return len(self.members) == 1

    def clip(self, squared_norm_GB: Tensor, valid_B: Tensor, group: int | None = None) -> Clip:
        """Decide how each sample enters the sum, so that over all groups it counts at most C.

        Args:
            squared_norm_GB: fp64, of each group's part of the gradients, alike on all cp ranks;
                (1, B) of `group` alone, where that is given.
            valid_B: bool; False for padding samples.
        """
        bounds = self.bounds if group is None else self.bounds[group : group + 1]
        assert len(squared_norm_GB) == len(bounds), (squared_norm_GB.shape, len(bounds))
        # Filled on the device: a copy from the host would make it wait.
        C_G1 = torch.cat([squared_norm_GB.new_full((1, 1), bound) for bound in bounds])
        return clip(squared_norm_GB, valid_B, max_grad_norm=C_G1, clip_function=self.clip_function)

    def group_of(self) -> dict[str, int]:
        """Return each parameter's group, an index of `members`."""
        return {name: group for group, names in enumerate(self.members) for name in names}


def clip_policy(
    names: Iterable[str], privacy: Privacy, *, max_grad_norm: float | None = None
) -> ClipPolicy:
    """Return the policy that the configuration asks for: one group with `flat`; with `per_layer`
    one of each module that holds parameters; with `per_block` each transformer block is one.

    Args:
        names: canonical, of all parameters that are trained.
        max_grad_norm: C > 0, if it is not the configuration's own.

    >>> names = ["embed.weight", "layers.0.a.weight", "layers.0.a.bias", "layers.0.b.weight"]
    >>> clip_policy(names, Privacy(clipping="per_layer")).members
    (('embed.weight',), ('layers.0.a.weight', 'layers.0.a.bias'), ('layers.0.b.weight',))
    >>> clip_policy(names, Privacy(clipping="per_block")).members
    (('embed.weight',), ('layers.0.a.weight', 'layers.0.a.bias', 'layers.0.b.weight'))
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = "" if privacy.clipping == "flat" else name.rpartition(".")[0]
        block = re.match(r".*?\.\d+\.", name) if privacy.clipping == "per_block" else None
        groups.setdefault(block.group() if block else layer, []).append(name)
    C = privacy.max_grad_norm if max_grad_norm is None else max_grad_norm
    return ClipPolicy(tuple(tuple(group) for group in groups.values()), C, privacy.clip_function)


def add_clipped_(accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    """Add one sample's scaled gradient to `accumulator` in place.

    A rejected sample is left out by selection, not by a factor of 0, since 0 x NaN is NaN. The
    kernel reads both tensors once and writes the sum once: 12 bytes a value. On CUDA it copies a
    row of `gradient` that is not contiguous first.

    Args:
        accumulator, gradient: fp32, of one shape: (N,), or (D, N) for D rows.
        factor: fp32, one value, from `clip`.
        rejected: bool, one value, from `clip`.
    """
    assert accumulator.dtype == gradient.dtype == torch.float32, (accumulator.dtype, gradient.dtype)
    assert accumulator.shape == gradient.shape, (accumulator.shape, gradient.shape)
    _add_scaled_(accumulator, gradient, factor, rejected)


@torch.library.custom_op("torchtitan_dp::add_scaled_", mutates_args=("accumulator",))
def _add_scaled_(accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    """Add in one kernel, on CUDA and on CPU; one operator, so that operations can be counted."""
    if accumulator.device.type == "cpu":
        if rejected:  # the same operation, on zeros: nothing of the sample is read
            gradient = factor = gradient.new_zeros(())
        accumulator.addcmul_(gradient, factor)
    elif accumulator.device.type == "cuda":
        _add_rows(accumulator, gradient, factor, rejected)
    else:
        _add_scaled(accumulator, gradient, factor, rejected)


@_add_scaled_.register_fake
def _(accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    return None


@torch.no_grad()
def _add_rows(accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    """Add each row of (D, N), or (N,), as a contiguous vector without autograd, compiled.

    Dynamo compiles another graph for each kind of layout, rank and grad mode, also of the tensor
    that an argument is a view of, and refuses the ninth: `data` is a view of nothing.
    """
    if accumulator.numel() == 0:
        return
    add = compile_kernel(_add_scaled)
    rows = zip(torch.atleast_2d(accumulator), torch.atleast_2d(gradient), strict=True)
    for total_N, gradient_N in rows:
        add(total_N.data, gradient_N.contiguous().data, factor.data, rejected.data)


def _add_scaled(accumulator: Tensor, gradient: Tensor, factor: Tensor, rejected: Tensor) -> None:
    accumulator.add_(torch.where(rejected, 0.0, gradient * factor))


def fp32_sum_excess(samples: int, ranks: int = 1) -> float:
    """Bound by how much more than C a record can move an fp32 sum, as a share of C.

    u (1 + u)^(n + W) (n (n + 1) - 2 + n (W (W + 1) - 2)) with u = 2^-24: about n^2 u for one rank
    (docs/proofs.md, "The sum in fp32"). Gradients and an order made for it reach two ninths of it.

    Args:
        samples: n, the most that one data-parallel rank adds up in a step: of a random draw, a
            number that it hardly ever exceeds.
        ranks: W, the data-parallel ranks whose sums are added up, in any order.
    """
    assert samples >= 0, samples
    assert ranks >= 1, ranks
    local = max(samples * (samples + 1) - 2, 0)
    across = samples * (ranks * (ranks + 1) - 2)
    return _ROUNDING * (1 + _ROUNDING) ** (samples + ranks) * (local + across)
