"""The clip policy: groups of parameters that are clipped together, their bounds, and the factors.

Flat clipping is one group (Abadi et al. 2016). Group-wise clipping (McMahan et al. 2018; DP-ZeRO,
Bu et al. 2023, section 2.1) needs no norm of the whole gradient, so that a group can be clipped as
soon as backward has reached it.

Guarantee:
    `ClipPolicy` alone has C, and alone decides factors: no gradient method can clip by other terms
    than those of the noise and of epsilon. The groups divide the parameters: each is in one group,
    and only there. If a sample's gradient of each of the M groups has a norm of at most
    C / sqrt(M), its whole gradient has one of at most C. So the clipped sum has the sensitivity of
    flat clipping, and noise, epsilon and all that is published stay as they are. The groups depend
    on parameters' names alone: they are public. In units of a group's own bound its noise is
    sigma sqrt(M) where flat noise is sigma.
"""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torchtitan_dp.privacy.clipping import Clip, ClipFunction, clip
from torchtitan_dp.privacy.settings import Privacy


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

    def clip(
        self, squared_norm_GB: torch.Tensor, valid_B: torch.Tensor, group: int | None = None
    ) -> Clip:
        """Decide how each sample enters the sum, so that over all groups it counts at most C.

        Args:
            squared_norm_GB: fp64, of each group's part of the gradients, alike on all cp ranks.
            valid_B: bool; False for padding samples.
            group: the one that `squared_norm_GB`, then of shape (1, B), is of; None: all, in order.

        Returns:
            The factor and fate of each group of each sample: of the shape of the norms.
        """
        bounds = self.bounds if group is None else self.bounds[group : group + 1]
        assert len(squared_norm_GB) == len(bounds), (squared_norm_GB.shape, len(bounds))
        # Filled on the device: a copy from the host would make it wait.
        bound_G1 = torch.cat([squared_norm_GB.new_full((1, 1), bound) for bound in bounds])
        return clip(
            squared_norm_GB, valid_B, max_grad_norm=bound_G1, clip_function=self.clip_function
        )

    def group_of(self) -> dict[str, int]:
        """Return each parameter's group, an index of `members`."""
        return {name: group for group, names in enumerate(self.members) for name in names}


def clip_policy(
    names: Iterable[str], privacy: Privacy, *, max_grad_norm: float | None = None
) -> ClipPolicy:
    """Return the policy that the configuration asks for: one group with `flat`; with `per_layer`
    one of each module that holds parameters, or of each of `clipping_groups`.

    Args:
        names: canonical, of all parameters that are trained.
        max_grad_norm: C > 0, if it is not the configuration's own.

    Raises:
        ValueError: a parameter fits no pattern, or a pattern has no parameter left to it; a
            sentence that names it.

    >>> names, per_layer = ["a.weight", "a.bias", "b.weight"], Privacy(clipping="per_layer")
    >>> clip_policy(names, per_layer).members
    (('a.weight', 'a.bias'), ('b.weight',))
    """
    clipping, patterns = privacy.clipping, privacy.clipping_groups
    groups: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    for name in names:
        if clipping == "flat":
            group = ""
        elif patterns:
            fitting = _first_fitting(name, patterns)
            if fitting is None:
                raise ValueError(f"'{name}' fits none of them; '*' as the last one takes the rest")
            group = fitting
        else:
            group = name.rpartition(".")[0]
        groups.setdefault(group, []).append(name)
    for pattern in patterns:
        if clipping != "flat" and not groups[pattern]:
            raise ValueError(f"'{pattern}' has no trained parameter that is not in one before it")
    members = tuple(tuple(group) for group in groups.values() if group)
    C = privacy.max_grad_norm if max_grad_norm is None else max_grad_norm
    return ClipPolicy(members, C, privacy.clip_function)


def patterns_in_use(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the patterns that some parameter belongs to: those that a part of a model needs.

    Args:
        names: as for `clip_policy`.
        patterns: of shells, such as `layers.*.attention.*`, for whole names. A parameter belongs to
            the first that fits.

    >>> patterns_in_use(["layers.0.w", "layers.1.w"], ["layers.0.*", "layers.7.*", "*", "layers.*"])
    ['layers.0.*', '*']
    """
    used = {_first_fitting(name, patterns) for name in names}
    return [pattern for pattern in patterns if pattern in used]


def _first_fitting(name: str, patterns: Sequence[str]) -> str | None:
    """Return the pattern that a parameter belongs to."""
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
