"""From private records to microbatches.

Once, before training, `prepare` reads the rows of files (`files`, `formats`), takes their texts
apart (`reading`, `chat_template`) and writes their tokens into a `store`, grouped into `units`.
Training slices them: `samples`, then `batching`. `dataset` opens a run's data.
"""

import sys


def say(text: str, label: str = "not private") -> None:
    """Write a labelled line that depends on private records, without noise: for their owner, who
    runs the program. No file that may be published contains any of them."""
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
