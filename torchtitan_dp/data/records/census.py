"""What the lines of a data set have in place of a record's text, counted where they are parsed.

With `data.unit_field` every line is parsed anyway, to group lines by unit, and is counted on the
way. Otherwise lines are parsed for this alone: those of the first `PARSED_BYTES`, and more only
until every field that is asked for was found. Counts are kept beside the index, and are as private.

Guarantee:
    Counts decide one thing: data in which no line has a field that is asked for are refused before
    any step. That compares "none" with "at least one" over all lines, so two neighbours differ in
    it only if all lines that have the field are of one unit (docs/privacy.md states it as an
    assumption). All else is shown to the owner, labelled not private, and nothing follows from it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.index import cached_words
from torchtitan_dp.data.records.store import Fields, RecordStore

VERSION = "census-1"
PARSED_BYTES = 2**30
MOST_NAMES, MOST_CHARACTERS = 20, 40
"""Names of fields that are kept, the first that are met, and characters of each."""
_CHUNK = 2**12


class Wanted(NamedTuple):
    """A field that a record needs."""

    key: str  # of the configuration, which names it
    field: str
    what: str  # it must hold
    is_there: Callable[[object], bool]


@dataclasses.dataclass
class Census:
    """Counts of lines. PRIVATE."""

    lines: int = 0  # that were looked at
    undecodable: int = 0  # no JSON object
    without: list[int] = dataclasses.field(default_factory=list)  # objects, for each field wanted
    empty: int = 0  # objects whose last wanted field is empty
    pointed: int = 0  # objects whose unit is a number with a point
    example: str = ""  # one of these numbers
    names: list[str] = dataclasses.field(default_factory=list)
    has_more_names: bool = False

    def counter(
        self, wanted: tuple[Wanted, ...], unit_field: str | None
    ) -> Callable[[Fields | None], None]:
        """Return the function that counts a line: its object, or None if it is none."""
        known: set[str] = set()
        self.without = [0] * len(wanted)

        def count(fields: Fields | None) -> None:
            self.lines += 1
            if fields is None:
                self.undecodable += 1
                return
            if not known.issuperset(fields):
                self._meet(fields, known)
            for number, (_, field, _, is_there) in enumerate(wanted):
                self.without[number] += not is_there(fields.get(field))
            self.empty += fields.get(wanted[-1].field) in ("", [])
            if unit_field is not None and isinstance(unit := fields.get(unit_field), float):
                self.pointed += 1
                self.example = self.example or repr(unit)[:MOST_CHARACTERS]

        return count

    def _meet(self, fields: Fields, known: set[str]) -> None:
        """Keep the names of fields that are new, if there is room."""
        for name in fields:
            if name not in known and len(known) < MOST_NAMES:
                known.add(name)
                self.names.append(name[:MOST_CHARACTERS])
        self.has_more_names = not known.issuperset(fields)

    @property
    def has_all(self) -> bool:
        """Whether some line has each field that is wanted."""
        return all(lacking + self.undecodable < self.lines for lacking in self.without)

    @property
    def fields(self) -> str:
        """The lines' fields, in words."""
        more = ", …" if self.has_more_names else ""
        return f"their fields are {', '.join(sorted(self.names))}{more}"


def take_census(
    store: RecordStore,
    wanted: tuple[Wanted, ...],
    unit_field: str | None,
    folder: str,
    begun: Census,
) -> Census:
    """Read the counts of a store's lines that were kept, or count them.

    Args:
        unit_field: that the store was opened with.
        folder: where counts are kept.
        begun: filled by `counter` already if units were indexed just now; else empty.

    Raises:
        OSError: the files cannot be read, or counts not be kept.
    """
    terms = VERSION, store.place_hash, [(one.key, one.field) for one in wanted], unit_field
    name = hashlib.sha256(repr(terms).encode()).hexdigest()

    def counted() -> Census:
        if not begun.lines:
            _count(store, wanted, unit_field, begun)
        return begun

    words = cached_words(
        os.path.join(folder, f"{VERSION}-{name}.npy"),
        lambda write: write(_pack(counted())),
        lambda words: _unpack(words).lines > 0,
    )
    return _unpack(words)


def _count(
    store: RecordStore, wanted: tuple[Wanted, ...], unit_field: str | None, census: Census
) -> None:
    """Parse and count lines."""
    count = census.counter(wanted, unit_field)
    lines: Iterator[Fields | None] = iter(store.all_fields())
    progress, parsed = Progress("reading which fields lines have", len(store), "lines"), 0
    for start in range(0, len(store), _CHUNK):
        for fields in islice(lines, _CHUNK):
            count(fields)
        stop = min(start + _CHUNK, len(store))
        parsed += int(store.stored_bytes(np.arange(start, stop)).sum())
        progress.add(stop - start)
        if parsed >= PARSED_BYTES and census.has_all:
            break
    progress.end()


def _pack(census: Census) -> np.ndarray:
    """Write counts as int64 words."""
    text = json.dumps(dataclasses.asdict(census)).encode()  # ASCII
    return np.frombuffer(text.ljust(-(-len(text) // 8) * 8), dtype="<i8")


def _unpack(words: np.ndarray) -> Census:
    return Census(**json.loads(words.astype("<i8").tobytes()))
