"""A rank whose peer is gone or hangs ends in one line that names no bug of its own."""

import re

import pytest
import torch.distributed as dist

from tests.checkpoint.test_resume import Folder
from tests.processes.ranks import on_ranks
from tests.processes.runs import with_sigma
from torchtitan_dp.distributed.stop import lost_ranks_as_faults
from torchtitan_dp.process import Fault

LINE = re.compile(
    r"error: another rank is gone or hangs \(RuntimeError: \[[^ ]+\] (.*), at ([\w/]+\.py), "
    r"line \d+\): its own log has the reason; the same command resumes from the newest checkpoint"
)


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    """What a run printed whose rank 1 is killed while it trains: the real launcher's lines too."""
    folder = Folder(tmp_path_factory.mktemp("killed"), *with_sigma(1))
    run = folder.start("--training.steps=4000", "--checkpoint.no-enable", real=True)
    try:
        begun = folder.out / "steps_executed.log"
        run.wait_for(lambda: begun.exists() and folder.steps_begun() > 2, "the first steps")
        run.kill(run.workers()[1:])
        assert run.dies()
        return run.process.wait(), run.output()
    finally:
        run.end()


def test_a_killed_rank_is_one_line_of_the_others(survivor):
    code, output = survivor
    assert code == 1
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if "error:" in line]
    assert len(lines) == 1, output
    found = LINE.fullmatch(lines[0].partition("]:")[2])
    assert found is not None, lines[0]
    assert "by peer" in found[1]


def waited_in_vain() -> str:
    """What rank 0 ends with, which waits 1 s in a group of its own for a rank that never comes."""
    from datetime import timedelta

    import torch

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
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
    "error",
    [
        dist.DistNetworkError("The client socket has failed to connect to any network address"),
        dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0//rank"),
        dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"),
    ],
)
def test_so_are_the_store_and_nccl(error):
    with pytest.raises(Fault, match="another rank is gone or hangs"), lost_ranks_as_faults():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        dist.DistBackendError("ncclInvalidUsage: This usually reflects invalid usage"),
        ValueError("timed out waiting"),
    ],
)
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)) as raised, lost_ranks_as_faults():
        raise error
    assert raised.value is error
