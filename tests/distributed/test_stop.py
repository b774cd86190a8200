"""How long collectives wait once training has begun, in every group that it uses."""

import datetime

import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401

# isort: split
from torch.distributed import distributed_c10d
from torchtitan.distributed import ParallelDims

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.distributed.stop import shorten_timeouts
from torchtitan_dp.gradients.fsdp import ReductionGroups


def groups_without_the_short_timeout():
    """Ours and the world's; what is asked of each group is still done."""
    config = build.config("--comm.train_timeout_seconds=77", degrees=(1, 2, 2))
    dims = ParallelDims(1, 2, 2, 1, 1, 1, 1, 4)
    dims.build_mesh()
    groups = ReductionGroups.build("cpu", (1, 2, 2))
    set_timeout, shortened = distributed_c10d._set_pg_timeout, []

    def noted(timeout, group=None):
        assert timeout == datetime.timedelta(seconds=77)
        shortened.append(group or dist.group.WORLD)
        set_timeout(timeout, group)

    distributed_c10d._set_pg_timeout = noted
    try:
        shorten_timeouts(config, dims, groups.all())
    finally:
        distributed_c10d._set_pg_timeout = set_timeout
        set_timeout(datetime.timedelta(seconds=300), None)  # the ranks are reused
    used = [group for group in groups.all() if group is not None]
    return len(used), sum(group not in shortened for group in (*used, dist.group.WORLD))


def test_our_own_groups_wait_no_longer_than_torchtitans():
    assert on_ranks(4, groups_without_the_short_timeout) == [(2, 0)] * 4
