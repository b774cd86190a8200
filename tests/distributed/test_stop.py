"""A rank whose peer is gone or hangs ends in one line, as soon as timeouts say, in every group."""

import datetime
import os
import re
import signal
import time
from unittest import mock

import pytest
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401

# isort: split
import torch
from torch.distributed import distributed_c10d
from torchtitan.distributed import ParallelDims

from tests import build
from tests.checkpoint.test_resume import Folder
from tests.processes.ranks import on_ranks
from tests.processes.runs import with_sigma
from torchtitan_dp.base.process import Fault
from torchtitan_dp.distributed.agreement import lost_ranks_as_faults, shorten_timeouts
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.launch import EXIT_STOPPED

LINE = re.compile(
    r"error: another rank is gone or hangs \(RuntimeError: \[[^ ]+\] (.*), at ([\w/]+\.py), "
    r"line \d+\): its own log has the reason; the same command resumes from the newest checkpoint"
)


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    """What a run printed whose rank 1 is killed while it trains: the real launcher's lines too."""
    folder = Folder(tmp_path_factory.mktemp("killed"), *with_sigma(1))
    with folder.start("--training.steps=4000", "--checkpoint.no-enable", real=True) as run:
        begun = folder.out / "steps_executed.log"
        run.wait_for(lambda: begun.exists() and folder.steps_begun() > 2, "the first steps")
        run.kill(run.workers()[1:])
        assert run.dies()
        return run.process.wait(), run.output()


def test_a_killed_rank_is_one_line_of_the_others(survivor):
    code, output = survivor
    assert code == 1
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if "error:" in line]
    assert len(lines) == 1, output
    found = LINE.fullmatch(lines[0].partition("]:")[2])
    assert found is not None, lines[0]
    assert "by peer" in found[1]


def test_a_signal_ends_ranks_that_wait_for_each_other_before_the_first_step(tmp_path):
    """At once, to be run again: one that hangs would else keep all until a timeout."""
    folder = Folder(tmp_path, *with_sigma(1))
    with folder.start(real=True) as run:
        run.wait_for(lambda: "Training starts" in run.output(), "the rehearsal")
        os.kill(run.workers()[1], signal.SIGSTOP)
        time.sleep(3)  # until the other waits in a collective
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.wait(10) == EXIT_STOPPED
        assert run.dies()
    assert not (folder.out / "steps_executed.log").exists()


def waited_in_vain() -> str:
    """What rank 0 ends with, which waits 1 s in a group of its own for a rank that never comes."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 1:
        return "did not come"
    try:
        with lost_ranks_as_faults():
            dist.all_reduce(torch.ones(2), group=group)
    except Fault as fault:
        return str(fault)
    raise AssertionError("the collective waited for nobody")


def test_a_rank_that_does_not_come_is_one_line():
    line, _ = on_ranks(2, waited_in_vain)
    assert line.startswith("error: another rank is gone or hangs (RuntimeError: [")
    assert "Timed out waiting 1000ms for" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (dist.DistNetworkError("The client socket has failed to connect to any network"), True),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0//rank"), True),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 3."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (dist.DistBackendError("ncclInvalidUsage: This usually reflects invalid usage"), False),
        (ValueError("timed out waiting"), False),
    ],
)
def test_so_are_the_store_and_nccl_and_other_errors_keep_their_traceback(error, is_lost):
    with pytest.raises(Fault if is_lost else type(error)) as raised, lost_ranks_as_faults():
        raise error
    if is_lost:
        assert "another rank is gone or hangs" in str(raised.value)
    else:
        assert raised.value is error


def groups_without_the_short_timeout():
    """Ours and the world's; what is asked of each group is still done."""
    config = build.config("--comm.train_timeout_seconds=77", degrees=(1, 2, 2))
    dims = ParallelDims(1, 2, 2, 1, 1, 1, 1, 4)
    dims.build_mesh()
    groups = ReductionGroups.build("cpu", (1, 2, 2))
    # From torch 2.15 the private name, which TorchTitan calls, calls the public one.
    name = "set_timeout" if hasattr(distributed_c10d, "set_timeout") else "_set_pg_timeout"
    set_timeout, shortened = getattr(distributed_c10d, name), []

    def noted(timeout, group=None):
        assert timeout == datetime.timedelta(seconds=77)
        shortened.append(group or dist.group.WORLD)
        set_timeout(timeout, group)

    with mock.patch.object(distributed_c10d, name, noted):
        shorten_timeouts(config, dims, groups.all())
    set_timeout(datetime.timedelta(seconds=300), None)  # the ranks are reused
    used = [group for group in groups.all() if group is not None]
    return len(used), sum(group not in shortened for group in (*used, dist.group.WORLD))


def test_our_own_groups_wait_no_longer_than_torchtitans():
    assert on_ranks(4, groups_without_the_short_timeout) == [(2, 0)] * 4
