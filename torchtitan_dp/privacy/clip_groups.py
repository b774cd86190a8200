"""Which parameters are clipped together, each group by a bound of its own.

Flat clipping is one group (Abadi et al. 2016). Group-wise clipping (McMahan et al. 2018; DP-ZeRO,
Bu et al. 2023, section 2.1) needs no norm of the whole gradient, so that a group can be clipped as
soon as backward has reached it.

Guarantee:
    The groups divide the parameters: each is in one group, and only there. If a sample's gradient
    of each of the M groups has a norm of at most C / sqrt(M), its whole gradient has one of at most
    C. So the clipped sum has the sensitivity that flat clipping gives it, and noise, epsilon and
    all that is published stay as they are. The groups depend on parameters' names alone: they are
    public. In units of a group's own bound its noise is sigma sqrt(M) where flat noise is sigma.
"""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Clipping = Literal["flat", "per_layer"]


@dataclass(frozen=True)
class ClipGroups:
    """The clip groups, by the canonical names of their parameters."""

    members: tuple[tuple[str, ...], ...]
    max_grad_norm: float  # C: of a whole gradient

    @property
    def bound(self) -> float:
        """Give the norm that each group's part of a gradient is clipped to."""
        return self.max_grad_norm / math.sqrt(len(self.members))

    @property
    def is_flat(self) -> bool:
        return len(self.members) == 1

    def group_of(self) -> dict[str, int]:
        """Return each parameter's group, an index of `members`."""
        return {name: group for group, names in enumerate(self.members) for name in names}


def clip_groups(
    names: Iterable[str],
    max_grad_norm: float,
    clipping: Clipping = "flat",
    patterns: Sequence[str] = (),
) -> ClipGroups:
    """Divide parameters into groups.

    Args:
        names: canonical, of all that are trained.
        max_grad_norm: C > 0.
        clipping: "flat" makes one group; "per_layer" one of each module that holds parameters, or
            of each pattern.
        patterns: of "per_layer": of shells, such as `layers.*.attention.*`, for whole names. A
            parameter belongs to the first that fits.

    Raises:
        ValueError: a parameter fits no pattern, or a pattern has no parameter left to it; a
            sentence that names it.

    >>> clip_groups(["a.weight", "a.bias", "b.weight"], 1.0, "per_layer").members
    (('a.weight', 'a.bias'), ('b.weight',))
    """
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
    return ClipGroups(members, max_grad_norm)


def patterns_in_use(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the patterns that some parameter belongs to: those that a part of a model needs.

    Args: those of `clip_groups`.

    >>> patterns_in_use(["layers.0.w", "layers.1.w"], ["layers.0.*", "layers.7.*", "*", "layers.*"])
    ['layers.0.*', '*']
    """
    used = {_first_fitting(name, patterns) for name in names}
    return [pattern for pattern in patterns if pattern in used]


def _first_fitting(name: str, patterns: Sequence[str]) -> str | None:
    """Return the pattern that a parameter belongs to."""
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
