"""One background thread that does jobs: those that a step waits for first, each kind in order.

One thread is enough to keep a rank's share of samples ahead of its device, holds one sample's text
at a time, and lets nobody wait for more than the job in progress. It runs no collective.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

END_S = 5.0


class Jobs(Protocol):
    """Does jobs, now or later."""

    def submit(self, job: Callable[[], T], *, urgent: bool) -> "Future[T]":
        """Take a job on; its future holds what it returns or raises."""
        ...

    def close(self) -> None:
        """Take no more jobs on, and forget those that were not begun."""
        ...


class Worker:
    """Does jobs in a thread of its own, which begins with the first of them."""

    def __init__(self) -> None:
        self._urgent: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._others: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, job: Callable[[], T], *, urgent: bool) -> "Future[T]":
        """Take a job on.

        Args:
            urgent: whether it goes before all that are not.
        """
        future: Future[T] = Future()
        with self._changed:
            assert not self._is_closed
            (self._urgent if urgent else self._others).append((job, future))
            self._changed.notify()
            if self._thread is None:
                # As a daemon: a run that ends by a fault waits for no tokenizer.
                self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """End the thread once the job in progress is done, which is waited for a little."""
        with self._changed:
            self._is_closed = True
            self._urgent.clear()
            self._others.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(END_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._others or self._is_closed)
                if self._is_closed:
                    return
                job, future = (self._urgent or self._others).popleft()
            try:
                result = job()
            except BaseException as error:  # the main thread asks for it
                future.set_exception(error)
            else:
                future.set_result(result)
