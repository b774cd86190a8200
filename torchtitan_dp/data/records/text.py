"""The record store of `training.dataset` = "text": one file, one record.

Guarantee:
    Where units are folders, a file that lies in none is a record that reads as nothing: nobody
    knows whose it is (hazard row 60).
"""

import codecs
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, is_readable, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.record_format import Format, checked, decode, fingerprint

_BLOCK_BYTES = 16 * 2**20
TEXTS_VERSION = "texts-1"  # of the format and of the name


class TextRecords:
    """Reads one file as one record."""

    reads_whole = False

    def __init__(self, files: Files, index_folder: str, *, by_folder: bool = False) -> None:
        """
        Args:
            by_folder: whether a file's unit is the folder that it lies in.
        """
        self._files, self._by_folder = files, by_folder
        hashed, unreadable = text_contents(files, index_folder)
        self._unreadable = frozenset(unreadable.tolist())  # when they were hashed
        self.fingerprint = fingerprint("text", files, str(len(files)), hashed)
        self.place_hash = f"text-{files.place_hash}"

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        path = self._files.path(checked(index, len(self)))
        if self._is_silent(index):
            return None
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            return decode(data, max_bytes, start)
        except (OSError, UnicodeError):
            return None

    def fields(self, index: int) -> None:
        """Return None: a file has none."""

    def is_decodable(self, index: int) -> bool:
        if self._is_silent(checked(index, len(self))):
            return False
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            with open(self._files.path(index), "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    decoder.decode(block)
            decoder.decode(b"", final=True)
        except (OSError, UnicodeError):
            return False
        return True

    def size(self, index: int) -> int:
        if self._is_silent(checked(index, len(self))):
            return 0
        return int(self.stored_bytes(np.array([index]))[0])

    def _is_silent(self, index: int) -> bool:
        """Check whether a file reads as nothing, whatever its contents."""
        if index in self._unreadable:
            return True  # as the fingerprint has it, even if it can be read by now
        return self._by_folder and _folder(self._files.name(index)) is None

    def are_as_listed(self, indices: np.ndarray) -> bool:
        return all(self._files.is_as_listed(index) for index in indices.tolist())

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._files.starts[indices + 1] - self._files.starts[indices]

    def record_id(self, index: int) -> str:
        return self._files.name(checked(index, len(self)))

    def record_ids(self) -> Iterator[str]:
        return map(self._files.name, range(len(self)))

    def file_of(self, index: int) -> str:
        return self._files.path(checked(index, len(self)))

    def all_fields(self) -> Iterator[None]:
        return repeat(None, len(self))

    def unit_names(
        self, count: Callable[[Mapping[str, object] | None], None] | None = None
    ) -> Iterator[str | None]:
        return map(_folder, self.record_ids())

    def confirm_units(self, is_of: Callable[[int, str], bool]) -> None:
        """Do nothing: a file's unit is in its name, which stays."""


def _folder(name: str) -> str | None:
    """Return the first folder of a file's relative name; None if it lies in none."""
    folder, slash, _ = os.fsencode(name).partition(b"/")
    # not as the locale reads it, on which the unit must not depend
    return folder.decode("utf-8", "surrogateescape") if slash else None


def text_contents(files: Files, folder: str) -> tuple[str, np.ndarray]:
    """Find what files hold: their contents' hash, hex, private, and which of them cannot be read.

    The latter are int64 indices, rising. The hash takes all of them for the same. It is made anew
    once one of them can be read.
    """
    words = cached_words(
        os.path.join(folder, f"{TEXTS_VERSION}-{files.place_hash}.npy"),
        lambda write: _write_texts(write, files),
        lambda words: len(words) >= DIGEST_WORDS,
        lambda words: not any(is_readable(files, int(i)) for i in words[DIGEST_WORDS:]),
    )
    return digest_hex(words[:DIGEST_WORDS]), words[DIGEST_WORDS:]


def _write_texts(write: WriteWords, files: Files) -> None:
    contents = read_contents(files, skip_unreadable=True)
    write(np.frombuffer(contents.digest, dtype="<i8"))
    write(np.array(contents.unreadable, dtype=np.int64))


def _open(files: Files, text_field: str, unit_field: str | None, index_folder: str) -> TextRecords:
    return TextRecords(files, index_folder, by_folder=unit_field is not None)


TEXT = Format(
    open=_open,
    below=("**",),
    has_stdlib=True,
    row="file",
    found_in="file",
    record="one file",
    has_fields=False,
    named_by_position=False,
)
