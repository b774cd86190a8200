"""A run on two hosts: one is killed, their link goes down, their records differ. Thorough, and
skipped where there can be no network namespaces (tests/clusters/hosts.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.hosts import Launcher, TwoHosts
from tests.processes.runs import arguments, with_sigma, write_records

pytestmark = pytest.mark.thorough
GONE = "error: another rank is gone or hangs ("
LAUNCHER_GONE = "error: another node's launcher is gone, or cannot be reached ("


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with TwoHosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    data = write_records(tmp_path / "data")
    return arguments(
        *(tmp_path / "out", data, "--training.steps=4000", "--checkpoint.interval=5"),
        *("--comm.train_timeout_seconds=20", *with_sigma(1)),
    )


def errors(launcher: Launcher) -> list[str]:
    """The lines of its output that name an error, without the rank, after its end with code 1."""
    assert launcher.ends() == 1
    assert "Traceback" not in launcher.output()
    lines = [line.partition("]:")[2] or line for line in launcher.output().splitlines()]
    return [line for line in lines if line.startswith("error:")]


def test_a_run_of_two_hosts_ends_well(hosts, argv, tmp_path):
    argv = [*argv, "--training.steps=3"]
    first, second = (hosts.start(number, argv) for number in (0, 1))
    assert (first.ends(), second.ends()) == (0, 0)
    assert "[rank0]:" in first.output()
    assert "[rank1]:" in second.output()
    assert "[rank0]:" not in second.output()


@pytest.mark.parametrize("asked", [0, 1])
def test_both_launchers_end_with_the_code_of_a_stop_whichever_is_asked(asked, hosts, argv):
    launchers = [hosts.start(number, argv) for number in (0, 1)]
    launchers[0].wait_for("Saving the checkpoint")
    launchers[asked].ask_to_stop()
    assert [launcher.ends() for launcher in launchers] == [75, 75]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_is_one_line_of_the_other(killed, hosts, argv, tmp_path):
    launchers = [hosts.start(number, argv) for number in (0, 1)]
    launchers[0].wait_for("Saving the checkpoint")
    launchers[killed].kill()
    (line,) = errors(launchers[1 - killed])
    assert line.startswith(GONE)


def test_a_host_whose_first_is_killed_before_training_is_one_line(hosts, argv):
    first, second = (hosts.start(number, argv) for number in (0, 1))
    first.wait_for("to watch")  # both have joined
    first.kill()
    (line,) = errors(second)
    assert line.startswith((GONE, LAUNCHER_GONE))


def test_a_link_that_goes_down_ends_both(hosts, argv):
    """Nothing is reset: both wait for `comm.train_timeout_seconds`."""
    launchers = [hosts.start(number, argv) for number in (0, 1)]
    launchers[0].wait_for("Saving the checkpoint")
    hosts.cut()
    for launcher in launchers:
        assert any(line.startswith(GONE) for line in errors(launcher))
