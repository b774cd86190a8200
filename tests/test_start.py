"""What a start must not import, which costs every process its seconds; what a signal does to it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.processes import forks
from tests.processes.runs import CONFIG, said
from torchtitan_dp.launch import EXIT_STOPPED

HEAVY = (
    *("datasets", "pandas", "pyarrow", "transformers"),
    *("opacus", "opacus.privacy_engine", "torch._inductor.compile_fx"),
    *("scipy.stats", "scipy.signal", "scipy.optimize"),
)


def imported(*modules: str) -> set[str]:
    """What a new process has imported after `modules`."""
    forks.need()
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = said(sys.executable, "-c", code)
    done.check_returncode()
    return set(done.stdout.split())


@pytest.mark.slow
def test_a_run_and_its_plan_import_nothing_heavy_that_they_may_not_need():
    found = imported("torchtitan_dp.train.trainer", "torchtitan_dp.plan.__main__")
    assert found.isdisjoint(HEAVY), found.intersection(HEAVY)


@pytest.mark.slow
def test_training_without_a_launcher_is_one_line(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ended = said(sys.executable, "-m", "torchtitan_dp.train")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert line.startswith("error: RANK is not set: start it by `torchtitan-dp train`")


def test_the_launcher_says_what_it_does_before_it_imports_torch():
    assert "torch" not in imported("torchtitan_dp.launch")


def test_opacus_series_alone_is_opacus_series():
    from opacus.accountants.analysis.rdp import compute_rdp

    from torchtitan_dp.privacy.rdp import ORDERS, opacus_rdp

    for order in ORDERS[ORDERS < 1000]:
        terms = {"q": 0.01, "noise_multiplier": 0.7, "steps": 3, "orders": order}
        assert opacus_rdp().compute_rdp(**terms) == compute_rdp(**terms)


def into(log: str) -> None:
    """Send what this process says into a file."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)


def until(condition) -> None:
    """Poll, for a minute at most."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def launched(workers):
    """The launcher of two processes, whose workers are those of a test, without a plan."""
    from torch.distributed import run

    from torchtitan_dp import launch

    def checked(options):
        assert not {"SIGINT", "SIGHUP"} & set(options.signals_to_handle.split(","))
        assert os.stat(options.log_dir).st_mode & 0o077 == 0
        workers()

    with (
        mock.patch.object(run, "run", checked),
        mock.patch.object(launch, "_checked", lambda _, argv: argv),
    ):
        launch.main(["--processes", "2", "-m", "torchtitan_dp.train"])


def signalled_in_the_plan(connection, number, log):
    """A launcher whose plan is interrupted; nobody may be started then."""
    from torchtitan_dp import launch

    def plan(argv):
        os.kill(os.getpid(), number)
        time.sleep(60)

    into(log)
    run = ["-m", "torchtitan_dp.train", "--job.config_file", str(CONFIG)]
    with mock.patch.object(launch, "_run_plan", plan):
        launch.main(["--processes", "2", *run])


STOPPED = "Ctrl-C: stopped; the same command resumes from the newest checkpoint, if any"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_plan_ends_the_start_to_be_run_again(number, tmp_path):
    log = tmp_path / "log"
    assert forks.Process(signalled_in_the_plan, number, str(log)).wait(30) == EXIT_STOPPED
    told = log.read_text().splitlines()[1:]  # after "checking…"
    assert told == (["", STOPPED] if number == signal.SIGINT else [])


@pytest.mark.parametrize("nodes, waits", [("1", False), ("1:1", False), ("2", True), ("1:4", True)])
def test_variables_of_torchrun_are_left_out_or_refused(nodes, waits, monkeypatch, capsys):
    """A PyTorchJob of Kubernetes sets them, and a start would wait for its other nodes for ever."""
    from torchtitan_dp import launch

    for name, value in (("NNODES", nodes), ("NODE_RANK", "1"), ("RDZV_ENDPOINT", "192.0.2.1:1")):
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setattr(launch, "_checked", lambda _, argv: argv)
    monkeypatch.setattr(launch.Signals, "handle", lambda _: None)
    found = []
    monkeypatch.setattr(launch, "_run", lambda *_: found.extend(os.environ))
    with pytest.raises(SystemExit) if waits else contextlib.nullcontext():
        launch.main(["--processes", "1", "-m", "torchtitan_dp.train"])
    assert capsys.readouterr().err.startswith("error: PET_NNODES = '") == waits
    assert not [name for name in found if name.startswith("PET_")]
    assert bool(found) != waits


LISTENING = (
    "import signal, time; from torchtitan_dp.base.process import STOP_SIGNAL; "
    "signal.signal(STOP_SIGNAL, lambda *_: print('asked', flush=True)); "
    "print('ready', flush=True); time.sleep({}); print('saved', flush=True)"
)
STARTING = "import time; print('ready', flush=True); time.sleep(600)"


def pressed(connection, worker, times, log):
    """A launcher with one worker, a Python program, whose user presses Ctrl-C."""

    def workers():
        process = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
        connection.send(process.pid)
        until(lambda: "ready" in Path(log).read_text())
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        process.wait(60)

    into(log)
    tempfile.tempdir = str(Path(log).parent)
    launched(workers)


def hung_up(connection, log, nohup):
    """A launcher with one worker, whose terminal is closed."""
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    into(log)
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    else:
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)

    def workers():
        with open(log, "a") as file:
            program = [sys.executable, "-c", LISTENING.format(2)]
            process = subprocess.Popen(program, stdout=file, start_new_session=True)
        until(lambda: "ready" in Path(log).read_text())
        os.close(master)  # the kernel sends SIGHUP
        process.wait(60)
        print("a worker's line", flush=True)

    launched(workers)


ASKED = "Ctrl-C: finishing this step and saving; again: stop now, epsilon counts lost steps"


@pytest.mark.parametrize(
    "worker, times, code, told",
    [
        (LISTENING.format(0.5), 1, EXIT_STOPPED, [ASKED, "asked", "saved"]),
        (LISTENING.format(600), 2, 130, [ASKED, "asked", "", STOPPED]),
        (STARTING, 1, EXIT_STOPPED, [STOPPED]),
    ],
    ids=["in a step", "twice", "while starting"],
)
def test_ctrl_c_is_one_line_and_loses_nothing_unless_pressed_again(
    worker, times, code, told, tmp_path
):
    log = tmp_path / "log"
    process = forks.Process(pressed, worker, times, str(log))
    pid = process.connection.recv()
    assert process.wait(60) == code
    assert log.read_text().splitlines()[1:] == ["ready", "", *told]
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not Path(f"/proc/{pid}").exists()  # killed, or ended and reaped
    assert [*tmp_path.iterdir()] == [log]  # no worker's output


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_gone_stops_a_run_that_was_not_to_outlive_it(nohup, tmp_path):
    log = tmp_path / "log"
    code = forks.Process(hung_up, str(log), nohup).wait(60)
    told = [line for line in log.read_text().splitlines() if not line.startswith("checking")]
    expected = ["ready", "saved", "a worker's line"] if nohup else ["ready", "asked", "saved"]
    assert (code, told) == (0 if nohup else EXIT_STOPPED, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rendezvous",
    [
        ("--rdzv_backend=c10d", "--rdzv_conf=is_host=0,read_timeout=1"),
        ("--rdzv_backend=static", "--rdzv_conf=timeout=1", "--node_rank=1"),
    ],
)
def test_a_launcher_without_the_first_nodes_is_one_line(rendezvous):
    """Nothing answers at port 1, as when the first node is gone."""
    ended = said(
        *(sys.executable, "-m", "torchtitan_dp.launch", "--nnodes=2", "--nproc_per_node=1"),
        *("--rdzv_endpoint=localhost:1", *rendezvous, "-m", "torchtitan_dp.train"),
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("error: another node's launcher is gone, or cannot be reached (")
    assert line.endswith("the same command resumes from the newest checkpoint")
    assert "while trying to connect to (localhost, 1)" in line


@pytest.mark.slow
def test_a_failed_worker_that_is_not_shown_has_its_last_lines_printed(tmp_path):
    """And nothing that a worker printed stays on the disk."""
    worker, logs = tmp_path / "worker.py", tmp_path / "logs"
    worker.write_text("import os, time\ntime.sleep(99 * (os.environ['RANK'] == '0'))\n1 / 0\n")
    logs.mkdir()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torchtitan_dp.launch", "--nproc_per_node=2", "--tee=3"),
            *("--rdzv_endpoint=localhost:0", "--local-ranks-filter=0", worker),
        ],
        env={**os.environ, "TMPDIR": str(logs)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "[rank1]: ZeroDivisionError: division by zero" in ended.stderr
    assert not [*logs.iterdir()]
