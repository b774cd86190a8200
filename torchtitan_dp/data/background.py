"""A background thread that runs jobs in order, and no collective.

It is a daemon, unlike the threads of a `ThreadPoolExecutor`, which Python joins at exit, so that a
run that fails does not wait for a disk that hangs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

END_S = 5.0
"""Time limit of `close` for the job in progress, which a library may not survive cutting off."""


class Background:
    """One thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._is_closed = False

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Queue a job; the future has its result or its exception."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        self._jobs.put(work)
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the job in progress; forget those that were not begun."""
        self._is_closed = True
        self._jobs.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def _work(self) -> None:
        while not self._is_closed:
            job = self._jobs.get()
            if not self._is_closed:
                job()
