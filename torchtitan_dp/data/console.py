"""Lines on stderr about private records: each is labelled, here and nowhere else.

What these lines say depends on the records themselves, without noise. They are for the owner of the
records, who runs the program; no file that may be published has any of it.
"""

import sys


def say(text: str) -> None:
    """Write a line that depends on private records."""
    print(f"not private: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Write a warning that depends on private records."""
    print(f"warning (not private): {text}", file=sys.stderr, flush=True)
