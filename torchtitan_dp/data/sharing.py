"""Which rank makes which sample: one of the context-parallel (cp) group that it is dealt to."""

from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class ContextGroup(NamedTuple):
    """Tells which ranks share a sample; those of the world are numbered group by group."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0  # this one's, within the group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "ContextGroup":
        """Describe a process group; None is this rank alone."""
        if group is None:
            return cls()
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    @classmethod
    def over(cls, mesh: DeviceMesh | None) -> "ContextGroup":
        """Describe the ranks of a one-dimensional mesh; None is this rank alone."""
        return cls.of(None if mesh is None else mesh.get_group())

    def maker(self, number: int, slots: np.ndarray, row: int) -> int:
        """Tell which rank of the group makes a sample: all take turns, over a step's microbatches.

        Args:
            number: of the microbatch in its step.
            slots: of the microbatch (`loading.Dealt`).
            row: the sample's place among them.
        """
        return (number * len(slots) + row) % self.size


ALONE = ContextGroup()
