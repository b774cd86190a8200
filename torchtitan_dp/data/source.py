"""The files of a data set and how they are read, with all that their names and headers show.

Guarantee:
    A data set is refused for what its records hold only if none of them has a text, or none a unit:
    each refusal here compares "none at all" with "at least one" (docs/privacy.md). The files that
    count are those that the path names; of a folder with a list of its files, those on the list.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from torchtitan_dp.data.console import Lack, listed
from torchtitan_dp.data.files import Files, list_files, locate
from torchtitan_dp.data.formats import FOLDER, Format, format_named
from torchtitan_dp.data.reading import Reading
from torchtitan_dp.data.tokenizer import Tokenizer

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation")
# By format, files with a list of those that count, of which this program reads none: the others
# that lie beside them hold rows that were deleted.
_LISTS = {
    "arrow": (r"(^|/)state\.json$", "a saved data set", "set training.dataset = 'hf'"),
    "parquet": (
        r"(^|/)_delta_log/|\.metadata\.json$",
        "a table of Delta or Iceberg",
        "write its rows as Parquet to another folder",
    ),
}


@dataclass(frozen=True)
class Source:
    """Files, and how they are read."""

    format: str
    path: str
    reading: Reading
    tokenizer: Tokenizer
    unit_field: str | None = None

    @property
    def facts(self) -> Format:
        return format_named(self.format)

    @property
    def keys(self) -> dict[str, str]:
        """The configuration's key of each field that is read."""
        unit = {self.unit_field: "data.unit_field"} if self.unit_field and self.facts.fields else {}
        return {**self.reading.keys, **unit}

    @property
    def terms(self) -> dict[str, object]:
        """The terms, besides the files, that decide ids and units."""
        template = self.reading.template.identity if self.reading.template else ""
        read = {"format": self.format, "fields": self.reading.keys, "unit_field": self.unit_field}
        return {**read, "tokenizer": self.tokenizer.identity, "template": template}

    @property
    def dtype(self) -> np.dtype[Any]:
        """The integers that hold the ids and their complements."""
        return np.dtype("<i2" if self.tokenizer.get_vocab_size() <= 2**15 else "<i4")

    def check(self) -> None:
        """Refuse, by ValueError in one line, fields that the format has not."""
        named, none = self.facts.fields, f"{self.format} files have no fields"
        for name, key in [*self.reading.keys.items(), (self.unit_field, "data.unit_field")]:
            mistake = None
            if named and name == "":
                mistake = f"name the {named}"
            elif named and key == "data.messages_field" and not self.facts.has_lists:
                mistake = f"{none} with lists; use training.dataset = 'jsonl' or 'parquet'"
            elif not named and key == "data.unit_field" and name not in (None, FOLDER):
                place = "the first folder below training.dataset_path"
                mistake = f"{none}; use '{FOLDER}' ({place}), or remove it: one file, one unit"
            elif not named and key in ("data.prompt_field", "data.messages_field"):
                mistake = f"{none}; use training.dataset = 'jsonl', or remove it"
            if mistake:
                raise ValueError(f"{key} = {name!r}: {mistake}")

    def refuse_names_by_position(self, heldout_fraction: float, in_groups: bool) -> None:
        """Refuse units whose names depend on other records, where their number is secret."""
        if self.unit_field is not None or not self.facts.named_by_position:
            return
        row, key = self.facts.row, "privacy.sample_rate"
        which = f"with a public {key}, one {self.format} {row} more would change which {row}s"
        if in_groups:
            take_turns = f"{which} take turns together; set data.unit_field, or remove {key}"
            raise ValueError(f"privacy.noise = 'banded': {take_turns}")
        if heldout_fraction > 0:
            setting = f"data.heldout_fraction = {heldout_fraction}: {which} are held out"
            remedy = f"keep held-out records in another file and set it to 0, or remove {key}"
            raise ValueError(f"{setting}; {remedy}")

    def files(self) -> Files:
        """List the files that the path names; ValueError, one line, if there are none, or the
        format has not the fields that are read."""
        if not self.path:
            remedy = "give a file, a directory or a glob ('python-stdlib' to try)"
            raise ValueError(f"training.dataset_path is not set: {remedy}")
        self.check()
        facts = self.facts
        try:
            if facts.listed is not None:
                files = list_files(*facts.listed(self.path))
            else:
                found = locate(self.path, facts.below, has_stdlib=not facts.fields)
                files = list_files(*found)
        except OSError as error:
            setting = f"training.dataset_path = {self.path!r}"
            raise ValueError(f"{setting}: cannot be read ({error}): check permissions") from error
        mark, what, remedy = _LISTS.get(self.format, ("$^", "", ""))
        if own := next((name for name in files.passed if re.search(mark, name)), None):
            lists = f"{own} lists the files of {what}, and others may be left over"
            remedy = f"{remedy}, or name files by a glob"
            raise ValueError(f"training.dataset_path = {self.path!r}: {lists}; {remedy}")
        if not files.names:
            raise ValueError(self.no_record(files))
        return files

    def no_record(self, files: Files) -> str:
        """Describe a path without a record."""
        none = f"training.dataset_path = {self.path!r} holds no record: it needs at least one"
        hint = "a glob must match files, not folders; '**' matches any depth"
        hint = f"not private: there are {_endings(files.passed)}" if files.passed else hint
        return f"{none} {self.facts.found_in} ({hint})"

    def notices(self, files: Files) -> list[str]:
        """Describe files that are left out, and splits that are read together. NOT PRIVATE."""
        found, facts = [], self.facts
        if files.passed:
            why = f"'{self.format}' takes {', '.join(facts.below)}".replace("**/", "")
            remedy = "if they hold records, convert or rename them, or name all files by a glob"
            if facts.listed is not None:
                why = "the folder's state.json does not name them"
                remedy = "remove them if they are left over, or save the data set again"
            every = len(files.passed) + len(files.names)
            what = f"{len(files.passed):,} of {every:,} files in training.dataset_path are not read"
            found.append(f"{what} ({_endings(files.passed)}), since {why}; {remedy}")
        words = (set(re.split(r"[^a-z]+", name.lower())) & _SPLITS.keys() for name in files.names)
        splits = Counter(split for of in words for split in {_SPLITS[word] for word in of})
        if "train" in splits and len(splits) > 1:
            counted = ", ".join(f"{count:,} of '{split}'" for split, count in splits.items())
            what = f"by their names, files of several splits are trained on together: {counted}"
            found.append(f"{what}; name those to train on alone by training.dataset_path")
        return found

    def refuse_lacks(self, lacks: Iterable[Lack], none: str, records: str = "") -> NoReturn:
        """Refuse a data set for what its records lack, the most frequent first."""
        first, *others = sorted(lacks, key=lambda lack: -lack.number)
        also = "".join(f"; {one.number:,} {one.what} ({one.setting})" for one in others)
        remedy = first.remedy or self.facts.explain(first.file, next(iter(self.reading.keys)))
        named = f" (not private: {first.they} {listed(first.names)})" if first.they else ""
        what = f"{first.setting}: {none}: {first.number:,} {records}{first.what}"
        raise ValueError(f"{what}{also}; {remedy}{named}")

    def refuse_units(self, lacks: Sequence[Lack], count: int) -> NoReturn:
        """Refuse a data set none of whose records has a unit."""
        facts, setting = self.facts, f"data.unit_field = {self.unit_field!r}"
        none = f"{setting}: none of the {count} records has one"
        if not facts.fields:
            why = "every file lies in no folder below training.dataset_path"
            raise ValueError(f"{none}: {why}; give a path above the units' folders")
        if (named := next((lack for lack in lacks if lack.names), None)) is not None:
            remedy = f"name the {facts.fields} that holds the unit, a string or a whole number"
            have = f"{named.they} {listed(named.names)}"
            raise ValueError(f"{none}: {remedy} (not private: {have})")
        none = f"training.dataset_path: none of the {count} {facts.row}s is a {facts.content}"
        raise ValueError(f"{none}; {facts.explain(lacks[0].file, str(self.unit_field))}")


def _endings(names: Iterable[str]) -> str:
    counted = Counter(os.path.splitext(name)[1] or "no ending" for name in names)
    return listed(f"{count:,} {ending}" for ending, count in counted.most_common())
