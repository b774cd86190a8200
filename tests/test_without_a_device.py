"""The commands of a login node: PyTorch's CUDA build, which most users have, and no device. There
most questions about a device raise. With the CPU build, its CUDA parts are imitated."""

import functools
import sys

import pytest

from tests.login_node import imitate
from tests.processes import forks
from tests.processes.runs import arguments, write_records
from tests.report.test_report import take_steps
from torchtitan_dp import __main__ as command
from torchtitan_dp import launch
from torchtitan_dp.plan import __main__ as plan

COMMANDS = {
    "plan": "without the model, 1%",
    "prepare": "tokens to train on",
    "report": "report.html",
    "report --status": "finished",
    "ledger": "epsilon",
    "release": "error: ",
    "selfcheck --help": "usage: ",
    "train --help": "usage: ",
    "tune --help": "usage: ",
}
"""Commands, and a word of what each prints."""


@pytest.fixture(params=["no driver", "hidden devices", "old driver"])
def host(request, monkeypatch, own_cache):
    imitate(monkeypatch.setattr, devices=2 * (request.param == "old driver"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if request.param != "hidden devices":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return request.param


def argv(name, folder):
    """The command line, on records, or on a run that has no checkpoint to release."""
    first, *options = name.split()
    if first in ("report", "ledger", "release"):
        (folder / "run").mkdir()
        take_steps(folder / "run", 6)
        return [first, str(folder / "run"), *options, *[str(folder / "out")] * (first == "release")]
    tiny = arguments(folder / "out", write_records(folder / "data"))
    if first == "plan":
        return [first, *tiny, "--world_size=2", *options]
    return [first, *tiny] if first == "prepare" else [first, *options]


def exit_code(start, *arguments):
    try:
        start(*arguments)
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.mark.usefixtures("host")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_needs_no_device(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    expected = {"release": 2, "ledger": 1}.get(name, 0)  # the run has no checkpoint
    assert exit_code(command.main, argv(name, tmp_path)) == expected
    out = capsys.readouterr()
    assert COMMANDS[name] in out.out + out.err
    assert "Traceback" not in out.err


def test_a_start_is_checked_without_a_device(host, tmp_path, monkeypatch, capsys):
    """Before any worker starts: the plan, with the checks of this machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it would set for its workers
    monkeypatch.delitem(sys.modules, "torchtitan_dp.plan.__main__", raising=False)  # it runs it
    run = arguments(tmp_path / "out", write_records(tmp_path / "data"))
    code = exit_code(launch._checked, "auto", ["-m", "torchtitan_dp.train", *run])
    assert code == (2 if host == "old driver" else 0)
    assert ("error: NVIDIA driver" in capsys.readouterr().err) == (host == "old driver")


@pytest.mark.slow
@pytest.mark.parametrize("host", ["no driver", "hidden devices"], indirect=True)
def test_a_prediction_of_a_ring_s_memory(host, tmp_path, monkeypatch, capsys):
    """Its process is on the same node. The search for the longest sample asks nothing more."""
    forks.need()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.login_node "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(plan, "predict", functools.partial(plan.predict, longest=False))
    ring = ["--world_size=2", "--parallelism.context_parallel_degree=2"]
    aligned = ["--training.seq_len=512", "--data.no-length_buckets"]  # else cuDNN is not asked for
    tiny = arguments(tmp_path / "out", write_records(tmp_path / "data"), *aligned)
    assert exit_code(plan.main, [*tiny, *ring, "--memory_gib=80"]) == 0
    assert "peak memory per rank, of 2 (predicted)" in capsys.readouterr().out
