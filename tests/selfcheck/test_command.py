"""`python -m torchtitan_dp.selfcheck`, alone and on ranks: exit codes, lines, what it leaves."""

import io
import json
import os
import textwrap
from contextlib import ExitStack, nullcontext, redirect_stderr

import pytest

from tests.processes import forks
from tests.processes.runs import CONFIG, Run

QUICK = ("--config", str(CONFIG), "--training.seq_len=64")


def alone(argv, folder, fault=None):
    """Exit code and stderr of a process without torchrun, which starts in `folder`."""
    from tests.selfcheck import faults
    from torchtitan_dp.base.process import RELEASES
    from torchtitan_dp.selfcheck.__main__ import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NGPU"):
        os.environ.pop(name, None)
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder)
    said = io.StringIO()
    planted = getattr(faults, fault)() if fault else nullcontext()
    RELEASES["torch"] = ("1.0",)  # of a fork alone
    with redirect_stderr(said), planted:
        try:
            main(argv)
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, said.getvalue()


def test_alone_it_passes_and_leaves_json_only(tmp_path):
    argv = [*QUICK, "--job.dump_folder", str(tmp_path / "a/b"), "--json", str(tmp_path / "said")]
    code, said = forks.call(alone, argv, tmp_path)
    assert code == 0, said
    assert " was not tested (1.0 were): train with it only if " in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["said"]
    result = json.loads((tmp_path / "said").read_text())
    checks = result["checks"]
    assert result["device"].startswith("CPU")
    assert result["passed"]
    assert all(check["passed"] and check["value"] <= check["bound"] for check in checks)
    for what in ("clipped sum, microbatch", "noise", "update", "checkpoint"):
        assert any(check["name"].startswith(what) for check in checks)
    assert "torch: " in said
    assert "free memory: " in said
    assert said.rstrip().endswith(f"{len(checks)} of {len(checks)} passed")


def test_a_check_that_fails_is_a_line_with_a_remedy_and_exit_code_1(tmp_path):
    argv = [*QUICK, "--job.dump_folder", str(tmp_path), "--json", str(tmp_path / "said")]
    code, said = forks.call(alone, argv, tmp_path, "checkpoint_loses_a_tensor")
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("FAILED")]
    assert line.startswith("FAILED: checkpoint, float32, mesh 1 x 1 x 1: tensors that changed")
    assert "another job.dump_folder" in line
    assert not json.loads((tmp_path / "said").read_text())["passed"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["said"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--training.seq_len=64"], "--training.seq_len=64: without --config there is nothing"),
        (["--job.config_file", "no.toml"], "job.config_file = 'no.toml': no such file"),
        ([*QUICK, "--privacy.gradient_method=other"], "other"),
        ([*QUICK, "--parallelism.context_parallel_degree=2"], "but there are 1 processes"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path, argv, line):
    code, said = forks.call(alone, argv, tmp_path)
    assert code == 2
    assert line in said
    assert len(said.splitlines()) == 1


@pytest.fixture
def start(tmp_path):
    """Starts two ranks, and ends them with the test."""
    with ExitStack() as runs:

        def begin(*program):
            arguments = [*QUICK, "--job.dump_folder", str(tmp_path / "run")]
            return runs.enter_context(Run(arguments, program=program, log=tmp_path / "log/log"))

        yield begin


def test_two_ranks_pass_and_one_of_them_talks(tmp_path, start):
    said = start("-m", "torchtitan_dp.selfcheck.__main__").finish()
    assert "ring attention, headtail, allgather, float32, mesh 1 x 1 x 2: 2" not in said
    assert "ring attention, headtail, allgather, float32, mesh 1 x 1 x 2" in said
    assert {line.partition(":")[0] for line in said.splitlines()} == {"[rank0]"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


SCRIPT = """
    import os, sys
    from unittest import mock
    import torch.distributed as dist
    from torchtitan_dp.selfcheck import __main__ as command

    real = command.steps.noise

    def broken(here, terms):
        if dist.get_rank() == 1:
            {fault}
        {others}
        return real(here, terms)

    command._COLLECTIVE_S = 3
    with mock.patch.object(command.steps, "noise", broken):
        command.main(sys.argv[1:])
"""


RAISES, NOISE = "raise RuntimeError('no kernel')", "noise, float32, mesh 1 x 1 x 2"


@pytest.mark.parametrize(
    ("fault", "others", "line"),
    [
        (RAISES, "return {}", f"FAILED: {NOISE}: rank 1: RuntimeError: no kernel; do not train"),
        (RAISES, "dist.barrier()", f"selfcheck: rank 1: {NOISE}: RuntimeError: no kernel"),
        ("os._exit(3)", "", "rank 1 failed with exit code 3"),
        ("os._exit(0)", "return {}", "error: another rank is gone or hangs"),
    ],
    ids=["raises", "leaves the others waiting", "dies", "is gone"],
)
def test_a_rank_that_cannot_go_on_ends_all_with_a_line(tmp_path, start, fault, others, line):
    script = tmp_path / "broken.py"
    script.write_text(textwrap.dedent(SCRIPT).format(fault=fault, others=others))
    run = start(str(script))
    assert run.process.wait(120) == 1
    assert run.dies()
    assert line in run.output(), run.output()
    assert "update, microbatch" not in run.output()
