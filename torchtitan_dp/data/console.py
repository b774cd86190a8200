"""Lines on stderr about private records: each is labelled, here and nowhere else.

These lines depend on the records themselves, without noise. They are for the records' owner, who
runs the program; no file that may be published contains any of them.
"""

import sys
import time

FIRST_LINE_S = INTERVAL_S = 5.0


def say(text: str) -> None:
    """Write a line that depends on private records."""
    print(f"not private: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Write a warning that depends on private records."""
    print(f"warning (not private): {text}", file=sys.stderr, flush=True)


class Progress:
    """Progress of long work, reported on stderr every 5 seconds after the first 5.

    Sizes are those of private records: its lines are labelled not private.
    """

    def __init__(self, what: str, total: int, things: str = "") -> None:
        """
        Args:
            what: the work, for the log.
            total: bytes, or `things`.
            things: the noun of counted things, if not bytes.
        """
        self._what, self._total, self._done = what, total, 0
        self._scale, self._things = (1.0, things) if things else (1e9, "GB")
        self._begin = time.monotonic()
        self._next = self._begin + FIRST_LINE_S
        self._has_reported = False

    def add(self, size: int) -> None:
        """Count `size` more bytes, or things, as done."""
        self._done += size
        now = time.monotonic()
        if now >= self._next:
            self._next, self._has_reported = now + INTERVAL_S, True
            self._tell(f"{100 * self._done // max(self._total, 1)}% of ", self._total, now)

    def end(self) -> None:
        """Report the end, if progress was reported before."""
        if self._has_reported:
            self._tell("all of ", self._total, time.monotonic())

    def _tell(self, share: str, total: int, now: float) -> None:
        rate, digits = self._done / max(now - self._begin, 1e-9), 2 if self._things == "GB" else 0
        size = f"{total / self._scale:,.{digits}f} {self._things}"
        say(f"{self._what}: {share}{size}, {rate / self._scale:,.2f} {self._things}/s")
