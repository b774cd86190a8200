"""Records without usable content: counted, refused if that is all of them, else a warning.

With `data.unit_field` every row is parsed anyway, to group rows by unit, and is counted on the way.
Otherwise rows are parsed for this alone: those of the first `PARSED_BYTES`, and more only until
every wanted field was found. Counts are kept beside the index, and are as private.

Guarantee:
    Counts decide one thing: data in which no row has a wanted field are refused before any step.
    That compares "none" with "at least one" over all rows, so two neighbours differ in it only if
    all rows that have the field are of one unit (docs/privacy.md states it as an assumption).
    Warnings, and names of fields and values in refusals, are computed from private records and
    labelled so; nothing follows from them.
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
from torchtitan_dp.data.records.format import Format
from torchtitan_dp.data.records.index import cached_words
from torchtitan_dp.data.records.store import Fields, RecordStore, text_of
from torchtitan_dp.data.samples.chat_template import messages_of
from torchtitan_dp.data.units import Units

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


def wanted_fields(
    text_field: str, prompt_field: str | None, messages_field: str | None
) -> tuple[Wanted, ...]:
    """List the fields that a row needs: that of the text, answer or messages last."""

    def is_text(value: object) -> bool:
        return text_of(value) is not None

    def is_chat(value: object) -> bool:
        return messages_of(value) is not None

    if messages_field is not None:
        return (Wanted("data.messages_field", messages_field, "list of messages", is_chat),)
    text = Wanted("data.text_field", text_field, "text", is_text)
    if prompt_field is None:
        return (text,)
    return Wanted("data.prompt_field", prompt_field, "text", is_text), text


def refuse_unreadable(
    store: RecordStore, facts: Format, wanted: tuple[Wanted, ...], census: Census
) -> None:
    """Refuse a data set in which no row has a wanted field.

    Raises:
        ValueError: one line; it names the files' true format, if that is another one.
    """
    if census.undecodable == census.lines:
        raise ValueError(_without_fields(store, facts, wanted))
    for one, lacking in zip(wanted, census.without, strict=True):
        if lacking + census.undecodable == census.lines:
            raise ValueError(
                f"{one.key} = {one.field!r}: none of the {census.lines} {facts.row}s has a "
                f"{one.what} there; name the field that holds it (not private: {census.fields})"
            )


def refuse_unnamed(
    store: RecordStore,
    facts: Format,
    units: Units,
    unit_field: str | None,
    wanted: tuple[Wanted, ...],
    census: Census | None,
) -> None:
    """Refuse a data set in which no record names its unit.

    Args:
        census: of a format with fields.

    Raises:
        ValueError: one line.
    """
    if unit_field is None or units.unnamed < len(store):
        return
    none = f"data.unit_field = {unit_field!r}: none of the {len(store)} records has one"
    if census is None:
        raise ValueError(
            f"{none}: every file lies in no folder below training.dataset_path; give a path above "
            "the units' folders"
        )
    if census.undecodable == census.lines:
        raise ValueError(_without_fields(store, facts, wanted))
    if census.pointed:
        raise ValueError(
            f"data.unit_field = {unit_field!r}: it holds {census.example}, a number with a point, "
            f"in {census.pointed} of {census.lines} {facts.row}s, and a usable unit in none; write "
            "whole numbers or strings (the number is not private)"
        )
    raise ValueError(
        f"{none}: name the {facts.fields} that holds the unit, a string or a whole number (not "
        f"private: {census.fields})"
    )


def _without_fields(store: RecordStore, facts: Format, wanted: tuple[Wanted, ...]) -> str:
    """Describe files without fields in any row."""
    assert facts.explain is not None, "only rows with fields are counted"
    found = facts.explain(store.file_of(0), wanted[-1].field, len(store))
    return f"training.dataset_path: {found}"


def warnings(
    store: RecordStore,
    facts: Format,
    units: Units,
    unit_field: str | None,
    wanted: tuple[Wanted, ...],
    census: Census | None,
    trained: int,
) -> tuple[str, ...]:
    """Describe the records without usable content. NOT PRIVATE: for `console.warn` alone.

    Args:
        trained: the number of units to train on.
        census: of a format with fields.
    """
    found = [] if census is None else _of_rows(facts, wanted, census, len(store))
    if units.unnamed:
        what = f"{units.unnamed} of {len(store)} {facts.row}s"
        lack = f"have no data.unit_field = {unit_field!r}"
        if not facts.fields:
            lack = "lie in no folder below training.dataset_path (data.unit_field = 'folder')"
        elif census is not None and census.pointed:
            lack += f" ({census.pointed} hold a number with a point, as {census.example})"
        found.append(
            f"{what} {lack}: each is a unit of its own that contributes nothing, and counts in "
            f"the number of units, so that q and the delta check are against {trained} units"
        )
    return tuple(found)


def _of_rows(facts: Format, wanted: tuple[Wanted, ...], census: Census, rows: int) -> list[str]:
    """Count the rows without a text."""
    first = "the first " if census.lines < rows else ""
    of = f"of {first}{census.lines} {facts.row}s"
    found = [
        f"{lacking} {of} have no {one.what} in {one.key} = {one.field!r} and contribute nothing; "
        f"{census.fields}"
        for one, lacking in zip(wanted, census.without, strict=True)
        if lacking
    ]
    if census.undecodable:
        found.append(f"{census.undecodable} {of} are no {facts.content}s and contribute nothing")
    if census.empty:
        last = wanted[-1]
        found.append(
            f"{census.empty} {of} are empty in {last.key} = {last.field!r} and contribute nothing"
        )
    return found
