"""One training run that is started again and again, and what must hold whenever it has ended."""

import os
import random
import resource
import signal
import time
from pathlib import Path

from tests.processes.runs import Run, arguments, privacy, with_sigma, write_records
from torchtitan_dp import ledger
from torchtitan_dp.checkpoint.folder import damaged_entry, finished_checkpoints
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.launch import EXIT_STOPPED

HUGE_BYTES = 100 * 2**30
COLLECTIVE_TIMEOUT_S = 20
SHUTDOWN_S = 30  # how long torchrun waits between SIGTERM and SIGKILL
ENDLESS = 100_000


class LossError(Exception):
    """Something was lost, unaccounted or left over."""


def require(holds: bool, what: str, process: Run | None = None) -> None:
    """Raise LossError, with the run's last lines, unless it holds."""
    if not holds:
        told = "" if process is None else "\n" + process.output()[-3000:]
        raise LossError(what + told)


class FaultyRun:
    """The dump folder and command line of the run that is ended in all ways."""

    def __init__(self, folder: Path, interval: int) -> None:
        self.out, self._log, self._starts = folder / "out", folder / "logs", 0
        self.interval = interval
        self.startup_s = 12.0  # until the first step; measured by the first start that gets there
        data = write_records(folder / "data")
        with (data / "record_huge.txt").open("wb") as huge:
            huge.truncate(HUGE_BYTES)
        self._command = arguments(self.out, data, *with_sigma(1))

    def start(self, *overrides: str, steps: int = ENDLESS) -> Run:
        self._starts += 1
        return Run(
            [
                *self._command,
                f"--training.steps={steps}",
                f"--checkpoint.interval={self.interval}",
                "--checkpoint.keep_latest_k=3",
                f"--comm.train_timeout_seconds={COLLECTIVE_TIMEOUT_S}",
                *overrides,
            ],
            log=self._log / f"{self._starts:03}.txt",
        )

    # What is on disk.

    def begun(self) -> list[int]:
        """Every step ever begun, in order."""
        path = self.out / ledger.EXECUTED_FILE
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[0]) for line in lines]

    def finished(self) -> int:
        """The newest checkpoint's step, 0 if there is none."""
        return next(iter(finished_checkpoints(str(self.out / "checkpoint"))), 0)

    def newest(self) -> Path:
        return self.out / "checkpoint" / f"step-{self.finished()}"

    def unfinished_saves(self) -> int:
        folders = self.out.glob("checkpoint/step-*")
        return sum(not (folder / ".metadata").exists() for folder in folders)

    # Moments.

    def wait(self, process: Run, seconds: float) -> None:
        """Pass time; a run that ends by itself meanwhile is a failure."""
        deadline = time.monotonic() + seconds
        process.wait_for(lambda: time.monotonic() > deadline, f"{seconds:.1f} s of life")

    def wait_for_steps(self, process: Run, count: int) -> None:
        """Until so many steps were begun by this start."""
        before, begun = len(self.begun()), time.monotonic()
        process.wait_for(lambda: len(self.begun()) >= before + count, f"{count} steps")
        self.startup_s = time.monotonic() - begun

    def wait_for_a_save(self, process: Run) -> None:
        """Until a save that this start has begun is on disk in part."""
        known = self.unfinished_saves()
        self.wait_for_steps(process, 1)
        process.wait_for(lambda: self.unfinished_saves() != known, "a save")

    def kill(self, process: Run, victim: str, rng: random.Random) -> None:
        """SIGKILL to the victims."""
        workers = process.workers()
        if victim == "launcher" or (victim == "one rank" and not workers):
            process.kill([process.process.pid])
        elif victim == "one rank":
            process.kill([rng.choice(workers)])
        else:
            process.kill(process.processes())

    # What must hold.

    def check_what_is_left(self, process: Run) -> int:
        """After any end: a whole checkpoint, and an account that covers it; the steps lost."""
        steps, finished = self.begun(), self.finished()
        if steps:
            faults = verify(str(self.out)).faults
            require(not faults, f"the account contradicts itself: {faults}", process)
        resumed = [line for line in process.output().splitlines() if "Training starts" in line]
        if resumed:
            first = int(resumed[0].rsplit(maxsplit=1)[1])
            require(first % self.interval == 1, f"{resumed[0]} is after no save", process)
        if finished:
            problem = damaged_entry(str(self.newest()), 0, 1)
            require(problem == "", f"step-{finished} is finished and damaged: {problem}", process)
            require(max(steps) >= finished, "a checkpoint of a step never begun", process)
            spent = privacy(self.out)
            require(spent["private"] is True, "privacy.json: not private", process)
            require(spent["steps"] >= finished, "privacy.json is behind a checkpoint", process)
        lost = steps[-1] - finished if steps else 0
        # An asynchronous save is done by the next one at the latest.
        require(lost <= 2 * self.interval, f"{lost} steps are lost", process)
        return lost

    def stop_by_sigterm(self) -> str:
        """As a scheduler ends a job: nothing is lost."""
        process = self.start()
        try:
            self.wait_for_steps(process, self.interval + 1)
            begun = time.monotonic()
            process.process.send_signal(signal.SIGTERM)
            require(process.process.wait(60) == EXIT_STOPPED, "another exit code", process)
            took = time.monotonic() - begun
            require(process.processes() == [], "stray processes", process)
            lost = self.check_what_is_left_exactly(process)
        finally:
            process.end()
        return f"exit code {EXIT_STOPPED} in {took:.1f} s, {lost} steps lost"

    def check_what_is_left_exactly(self, process: Run) -> int:
        lost = self.begun()[-1] - self.finished()
        require(lost == 0, f"{lost} steps are lost", process)
        require(damaged_entry(str(self.newest()), 0, 1) == "", "a damaged save", process)
        return lost

    def hang_a_rank(self) -> str:
        """A stopped process answers nothing: collectives time out, torchrun kills it."""
        process = self.start()
        try:
            self.wait_for_steps(process, 2)
            os.kill(process.workers()[-1], signal.SIGSTOP)
            begun = time.monotonic()
            code = process.process.wait(COLLECTIVE_TIMEOUT_S + SHUTDOWN_S + 60)
            took = time.monotonic() - begun
            require(code == 1 and process.processes() == [], f"exit code {code}", process)
        finally:
            process.end()
        return (
            f"exit in {took:.0f} s: {COLLECTIVE_TIMEOUT_S} s of comm.train_timeout_seconds, then "
            f"at most {SHUTDOWN_S} s of torchrun's"
        )

    def fill_the_disk(self) -> str:
        """A limit on the size of files, which saves meet first, stands for the disk's."""
        before = self.finished()
        process = self.start()
        try:
            process.wait_for(lambda: len(process.workers()) == 2, "workers")
            for pid in process.workers():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**17, 2**17))
            require(process.process.wait(120) == 1, "another exit code", process)
        finally:
            process.end()
        told = [line for line in process.output().splitlines() if "was not saved in" in line]
        require(len(told) >= 1 and "Traceback" not in process.output(), "not one line", process)
        require(self.finished() == before, "the checkpoint before is gone", process)
        require(damaged_entry(str(self.newest()), 0, 1) == "", "it is damaged", process)
        return "exit code 1, one line, the checkpoint before is whole"

    def to_the_end(self) -> str:
        """The last start gets to its last step, and the account is right."""
        before, begun, last = self.finished(), len(self.begun()), self.finished() + 4
        process = self.start(steps=last)
        try:
            output = process.finish()
        finally:
            process.end()
        require(f"Training starts at step {before + 1}" in output, "lost steps", process)
        spent, steps = privacy(self.out), self.begun()
        require(spent["steps"] == last == self.finished(), "another last step", process)
        require(spent["steps_executed"] >= len(steps) == begun + 4, "steps unaccounted", process)
        require(spent["epsilon_executed"] >= spent["epsilon"] > 0, "epsilon", process)
        return (
            f"{last} steps, {len(steps)} executed; epsilon = {spent['epsilon']:.3f}, executed "
            f"{spent['epsilon_executed']:.3f}"
        )
