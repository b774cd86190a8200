"""Starts the processes of tests by a fork of one that has imported everything, which takes 6 s.

    process = forks.Process(job, *arguments)

The server imports PyTorch, TorchTitan and this package, starts no thread, and forks a process for
each job that it is asked for. Such a process ends as any Python program does, by leaving the main
module: what it prints, its exit code and what runs at exit are as if it had been started anew.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
offered = True
"""Whether the running test may have other processes; else it is skipped where it asks for one."""
ADDRESS = "TORCHTITAN_DP_TEST_FORKS"
"""An environment variable: the server that is running already (tests/hazards/mutants)."""
THIRD_PARTY = (
    *("dp_accounting.pld.privacy_loss_distribution", "opacus.grad_sample"),
    *("scipy.signal", "scipy.stats", "torch._inductor.compile_fx"),
    *("torch.distributed.checkpoint", "torch.utils.tensorboard"),
    "transformers.models.llama.modeling_llama",
)
OURS = (
    *("torchtitan_dp.train.trainer", "torchtitan_dp.audit.__main__"),
    *("tests.processes.launcher", "tests.processes.ranks"),
)


def need() -> None:
    """Skip the running test where it may have no other process."""
    if not offered:
        pytest.skip("it needs another process")


class NoServerError(Exception):
    """Tells that no process can be forked: whatever a test wanted to show, it did not."""


class Process:
    """A process that the server forked: what `subprocess.Popen` offers, and a connection to it."""

    def __init__(self, job: Callable[..., None], *arguments: Any) -> None:
        """`job`: a module's function of the connection and `arguments`, all of them pickled."""
        need()
        try:
            self.connection: Connection[Any, Any] = Client(address())
        except OSError as error:
            raise NoServerError(f"at {address()}: {error}") from error
        self.connection.send((job, arguments))
        self.pid: int = self.connection.recv()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and self.connection.poll():
            self.ended(self.connection.recv())
        return self.returncode

    def ended(self, message: "Ended") -> None:
        assert isinstance(message, Ended), message
        self.returncode = message.code

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self.connection.poll(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a process of its own, which ends with it; its result."""
    process = Process(_answer, function, arguments)
    result = process.connection.recv()
    assert not isinstance(result, Ended), f"exit code {result.code} in {function.__name__}"
    return result


def _answer(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))


class Ended:
    """The last that a connection tells: its process's exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        self.code = code


@functools.cache
def address() -> str:
    """Where the server listens; the first call of a session starts one that ends with it."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    folder = tempfile.mkdtemp(prefix="forks-")
    path = f"{folder}/socket"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator starts one
        "MALLOC_ARENA_MAX": "1",  # else each thread reserves 64 MiB, where memory is limited
    }
    env.pop("TORCHTITAN_DP_LAUNCHER_PID", None)
    command = [sys.executable, "-m", "tests.processes.forks", path]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the server of forks has ended"
    return path


def preload(*modules: str) -> None:
    """Import what its children need, and keep the collector from looking through all of it."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _prepare() -> None:
    """Do once, for all processes that will be forked, what each would do or wait for."""
    import torchtitan.train
    from torchtitan.tools.logging import logger

    from tests.accounts import noise_multiplier
    from torchtitan_dp.train.spec import quiet

    # The noise that most runs need: the divergences are kept, and forked.
    noise_multiplier(target_epsilon=8.0, delta=1e-3, sample_rate=3 / 24, steps=4, accountant="rdp")
    assert torchtitan.train.time is time  # rank 0 sleeps 2 s when all is done
    awake = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    torchtitan.train.time = awake  # type: ignore[attr-defined]
    quiet(logger)


def without_help() -> None:
    """Have no help made, which costs each command line that is parsed 0.15 s."""
    import tyro._docstrings

    tyro._docstrings.get_field_docstring = lambda *_: None  # type: ignore[assignment]


def serve(listener: Listener, modules: tuple[str, ...] = OURS) -> None:
    """Import `modules`, and fork a process for each job that is asked for, with a second one that
    waits for its end and reports it; returns in such a process, its job done."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        connection = listener.accept()
        if modules:
            preload(*modules)
            _prepare()
            without_help()
            modules = ()
            threads = len(os.listdir("/proc/self/task"))
            assert threads == 1, f"{threads} threads: a fork copies their locks without them"
        if os.fork() == 0:
            break
        connection.close()
    listener.close()  # of this process alone
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    child = os.fork()
    if child != 0:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):  # nobody listens any more
            connection.send(Ended(code))
        os._exit(0)
    os.setsid()
    die_with_parent()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        job, arguments = connection.recv()
    except EOFError:
        return
    connection.send(os.getpid())
    job(connection, *arguments)


def die_with_parent() -> None:
    """As a worker does; its launcher is the process that forked it."""
    from torchtitan_dp.base import process

    os.environ.pop("TORCHTITAN_DP_LAUNCHER_PID", None)
    process.die_with_parent()


@contextlib.contextmanager
def forked_server(folder: str) -> Iterator[None]:
    """Offer this process, which has run nothing yet, as the server: a fork of it waits for jobs.
    Leaves the context by SystemExit in the processes that the server forks."""
    path = f"{folder}/forks"
    listener = Listener(path, "AF_UNIX")
    child = os.fork()
    if child == 0:
        serve(listener)
        raise SystemExit
    os.environ[ADDRESS] = path
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()  # not before: it removes the file that leads to the server


def main(path: str) -> None:
    preload(*THIRD_PARTY)
    listener = Listener(path, "AF_UNIX")
    print("ready", flush=True)
    serve(listener)


if __name__ == "__main__":
    from tests.processes import forks  # the module whose classes are pickled, not __main__

    forks.main(sys.argv[1])
