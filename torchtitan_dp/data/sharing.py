"""Which rank makes which sample: one of the context-parallel (cp) group that it is dealt to.

And, where machines compare (`comparison`), one on each machine that has no such rank.
"""

from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_dp.data.comparison import Place
from torchtitan_dp.data.loading import RecordLoader


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


def made_again(
    loader: RecordLoader,
    cp: ContextGroup,
    place: Place,
    positions: np.ndarray,
    lengths: np.ndarray,
) -> list[tuple[int, int]]:
    """List, by positions and lengths, what this rank makes of a draw only to compare it: its share
    of all that no rank of its machine makes to compute on.

    Args:
        positions, lengths: as of `RecordLoader.microbatches`.
    """
    machine = place.machine
    made_here = {
        position
        for rank in range(machine.start // cp.size, (machine.stop - 1) // cp.size + 1)
        for number, dealt in enumerate(loader.deal(positions, lengths, rank))
        for row, position in enumerate(dealt.slots.tolist())
        if rank * cp.size + cp.maker(number, dealt.slots, row) in machine
    }
    missing = [
        (position, length)
        for position, length in zip(positions.tolist(), lengths.tolist(), strict=True)
        if position not in made_here
    ]
    return missing[place.local_rank :: len(machine)]
