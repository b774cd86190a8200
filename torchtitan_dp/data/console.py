"""Lines on stderr about private records: each is labelled, here and nowhere else.

They depend on the records themselves, without noise, and are for their owner, who runs the program;
no file that may be published contains any of them.
"""

import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

FIRST_LINE_S = INTERVAL_S = 5.0
MOST_NAMES, MOST_CHARACTERS = 20, 60  # that are listed, and of each name


def say(text: str, label: str = "not private") -> None:
    """Write a line that depends on private records."""
    print(f"{label}: {printable(text)}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Write a warning that depends on private records."""
    say(text, "warning (not private)")


def printable(text: str) -> str:
    """Escape what would move a cursor or begin another line, as a name in a record may.

    >>> printable("a\\nb é")
    'a\\\\nb é'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed(names: Iterable[str]) -> str:
    """List names, in bounded space."""
    several = list(dict.fromkeys(printable(name[:MOST_CHARACTERS]) for name in names))
    more = ", …" if len(several) > MOST_NAMES else ""
    return ", ".join(sorted(several[:MOST_NAMES])) + more


class Lack(NamedTuple):
    """Why records have nothing to learn. PRIVATE, for their owner: it names what they have."""

    setting: str  # that does not fit them
    what: str  # they are or have, in the plural
    remedy: str = ""  # empty: that of the format (`Format.explain`)
    they: str = ""  # a phrase for what the names are of
    names: tuple[str, ...] = ()  # of fields, roles or types that they have instead
    is_undecodable: bool = True  # or else readable, and without an answer
    file: str = ""  # of one of these records
    number: int = 0  # of them

    def explain(self) -> str:
        """Describe them, with the setting."""
        named = f": {self.they} {listed(self.names)}" if self.names else ""
        return f"{self.number:,} {self.what} ({self.setting}{named})"


class Progress:
    """Progress of long work on private records, reported every 5 seconds after the first 5."""

    def __init__(self, what: str, total: int) -> None:  # bytes, about
        self._what, self._total, self._done = what, total, 0
        self._begin = time.monotonic()
        self._next = self._begin + FIRST_LINE_S
        self._has_reported = False

    def add(self, size: int) -> None:
        """Count `size` more bytes as done."""
        self._done += size
        if time.monotonic() >= self._next:
            self._next, self._has_reported = time.monotonic() + INTERVAL_S, True
            share = min(self._done / max(self._total, 1), 1.0)
            left = (time.monotonic() - self._begin) * (1 - share) / max(share, 1e-9)
            bar = "#" * int(20 * share)
            self._report(f"[{bar:.<20}] {share:.0%} of ", f", about {left / 60:,.1f} min left")

    def end(self) -> None:
        """Report the end, if progress was reported before."""
        if self._has_reported:
            self._report("all of ", f" in {(time.monotonic() - self._begin) / 60:,.1f} min")

    def _report(self, share: str, time_left: str) -> None:
        rate = self._done / max(time.monotonic() - self._begin, 1e-9)
        say(f"{self._what}: {share}{amount(self._total)}, {amount(rate)}/s{time_left}")


def amount(size: float) -> str:
    """Write a number of bytes for people.

    >>> amount(900), amount(31_500_000), amount(2e12)
    ('0.9 kB', '31.5 MB', '2,000.0 GB')
    """
    power = 3 if size < 1e6 else 6 if size < 1e9 else 9
    return f"{size / 10**power:,.1f} {'kMG'[power // 3 - 1]}B"
