"""The pace of a run, its words, and the bar on a terminal."""

import io
import json
import os
import re
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.watch import terminal
from torchtitan_dp.watch.processor import (
    SampleStatistics,
    bar_words,
    pace_words,
    samples_words,
    speed_words,
)
from torchtitan_dp.watch.terminal import Pace, Screen

SCALARS = {
    "epsilon": 2.5,
    "epsilon_planned": 7.96,
    "throughput(tps)": 1234.4,
    "memory/max_reserved(GiB)": 12.34,
}


def test_pace_leaves_out_the_first_step_and_counts_from_a_resume() -> None:
    clock = [100.0]
    pace = Pace(4, 10, now=lambda: clock[0])
    assert pace_words(pace) == "s/step: ?  ETA: ?"
    clock[0] += 60  # compiles
    pace.step_done(5)
    assert (pace.seconds_per_step, pace.seconds_left) == (60, 300)
    for step, seconds in ((6, 2), (7, 4)):
        clock[0] += seconds
        pace.step_done(step)
    assert pace_words(pace) == "s/step: 3  ETA: 0:00:09"


def test_mfu_is_shown_where_it_is_known() -> None:
    assert speed_words(SCALARS) == "memory: 12.34GiB  tps: 1,234"
    assert speed_words({**SCALARS, "mfu(%)": 41.26}) == "memory: 12.34GiB  tps: 1,234  mfu: 41.3%"


def test_no_step_waits_for_a_launcher_that_is_gone(tmp_path) -> None:
    screen = Screen(str(tmp_path / "gone"))
    screen.show(Pace(0, 2), 0.5, "", "")
    screen.close()


def test_rank_0_alone_draws(monkeypatch, tmp_path) -> None:
    path = str(tmp_path / "progress")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(path)
        launcher.setblocking(False)
        monkeypatch.setenv(terminal.SOCKET, path)
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            screen = Screen.of_launcher()
            public, speed = bar_words(Pace(0, 2), SCALARS)
            screen.show(Pace(0, 2), 0.25, public, f"microbatch {rank}  {speed}")
            screen.close()
        state = json.loads(launcher.recv(65536))
        assert state["private"] == "microbatch 0  1,234 tps  12.3 GiB"
        assert state["public"] == "ε 2.5 of 7.96"
        with pytest.raises(BlockingIOError):
            launcher.recv(65536)


def console_of(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


@pytest.mark.parametrize("width", [60, 120])
def test_the_bar_is_one_line_that_labels_what_is_not_private(width: int) -> None:
    console = console_of(width)
    drawing = terminal.Drawing(console)
    state = {"done": 7, "total": 12, "part": 0.5, "left": 31.0, "public": "ε 2.5 of 7.96"}
    drawing.show({**state, "private": "microbatch 5  3 s/step  1,234 tps  12.3 GiB"})
    drawing.stop()  # now the console prints nothing but what it is asked to
    with console.capture() as shown:
        console.print(drawing.render())
    line = shown.get()
    assert line.count("\n") == 1
    assert line.startswith("step 7/12 ")
    assert line.index("ε 2.5 of 7.96") < line.index("not private: ")
    assert ("ETA 0:00:31" in line) == ("12.3 GiB" in line) == (width == 120)


def test_lines_are_printed_whole_above_the_bar() -> None:
    console = console_of(20)
    above = terminal.Above(console, sys.__stdout__)
    above.write("a line that is longer ")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    above.write("than the terminal\nthe next")
    assert console.file.getvalue() == "a line that is longer than the terminal\n"  # type: ignore[attr-defined]


def test_where_there_is_no_terminal_nothing_is_changed(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    before = sys.stdout, sys.stderr
    with terminal.bar():
        assert (sys.stdout, sys.stderr) == before
        assert terminal.SOCKET not in os.environ


class Tty(io.StringIO):
    """A terminal that keeps what it gets."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_is_left_as_it_was(monkeypatch) -> None:
    tty, drawn, show = Tty(), threading.Event(), terminal.Drawing.show
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(
        terminal.Drawing, "show", lambda self, state: (show(self, state), drawn.set())
    )
    monkeypatch.setattr(sys, "stdout", tty)
    monkeypatch.setattr(sys, "stderr", tty)
    with terminal.bar():
        path = os.environ[terminal.SOCKET]
        screen = Screen(path)
        screen.show(Pace(3, 12), 0.5, "", "microbatch 5")
        assert drawn.wait(60)
        print("a worker's line")
    screen.close()
    assert terminal.SOCKET not in os.environ
    assert not os.path.exists(os.path.dirname(path))
    assert sys.stdout is sys.stderr is tty
    shown = re.sub(r"\x1b\[[0-9;]*m", "", tty.getvalue())
    assert "step 3/12" in shown
    assert "microbatch 5" in shown
    assert "a worker's line\n" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again


def test_a_launcher_that_ends_at_once_leaves_nothing_behind(monkeypatch, tmp_path) -> None:
    path = tmp_path / "torchtitan_dp_x" / "progress"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv(terminal.SOCKET, str(path))
    written: list[bytes] = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    monkeypatch.setattr(terminal.os, "write", lambda number, text: written.append(text))
    terminal.leave()
    assert not path.parent.exists()
    assert written[0].endswith(b"\x1b[?25h")


def test_an_empty_draw_is_shown_as_empty():
    """And a step that lost all its samples as that: neither has a loss, and `nan` looks broken."""
    empty = {"realized_batch_size": 0.0, "rejected": 0.0}
    assert samples_words(empty) == "batch: 0 (an empty draw)"
    lost = {**empty, "realized_batch_size": 3.0, "rejected": 3.0}
    assert samples_words(lost) == "batch: 3, all left out (not finite)"
    some = {**lost, "rejected": 1.0, "loss": 2.5, "clipped_fraction": 0.5, "norm_p50": 1.5}
    words = "loss: 2.5000  batch: 3  left out (not finite): 1  clipped: 50%  norm p50: 1.5"
    assert samples_words(some) == words


def test_a_step_without_a_finite_sample_has_counts_alone() -> None:
    """No NaN goes to TensorBoard."""
    dims: Any = SimpleNamespace(get_optional_mesh=lambda _: None)
    statistics, yes = SampleStatistics(), torch.tensor([True])
    assert statistics.reduce(dims) == {"realized_batch_size": 0.0, "rejected": 0.0}
    lost = Clip(torch.zeros(1), yes, torch.tensor([torch.nan]).double(), ~yes)
    statistics.add(torch.tensor([torch.inf]), yes, lost)
    assert statistics.reduce(dims) == {"realized_batch_size": 1.0, "rejected": 1.0}
    statistics.add(torch.ones(1), yes, Clip(torch.ones(1), ~yes, torch.ones(1).double(), ~yes))
    found = statistics.reduce(dims)
    assert (found["loss"], found["norm_p90"], found["clipped_fraction"]) == (1.0, 1.0, 0.0)
