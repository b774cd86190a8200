"""The format "text": one file, one record.

Guarantee:
    Where units are folders, a file that lies in none reads as nothing, since its unit is unknown
    (hazard row 60).
"""

import codecs
import os
from collections.abc import Iterator

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.format import Format, checked, decode, fingerprint, foreign
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, is_readable, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.store import RecordStore

_BLOCK_BYTES = 16 * 2**20
TEXTS_VERSION = "texts-1"  # of the index's format and name


class TextRecords(RecordStore):
    """Files. `record_id` is a file's relative path; with a unit field, its folder is its unit.

    A file that cannot be read when contents are hashed (no permission, or gone) reads as nothing
    as long as the store is open. Its digest is one public constant, so a rank that could read it
    would have another fingerprint.
    """

    def __init__(
        self, files: Files, text_field: str, unit_field: str | None, index_folder: str, **_: object
    ) -> None:
        self._files, self._by_folder = files, unit_field is not None
        hashed, unreadable = text_contents(files, index_folder)
        self._unreadable = frozenset(unreadable.tolist())  # when they were hashed
        self.fingerprint = fingerprint("text", files, str(len(files)), hashed)
        self.place_hash = f"text-{files.place_hash}"

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, max_bytes: int | None = None, start: int = 0) -> str | None:
        path = self.file_of(index)
        if self._is_silent(index):
            return None
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            return decode(data, max_bytes, start)
        except (OSError, UnicodeError):
            return None

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
            return True  # to agree with the fingerprint, even if it can be read by now
        return self._by_folder and _folder(self._files.names[index]) is None

    def are_as_listed(self, indices: np.ndarray) -> bool:
        return all(self._files.is_as_listed(index) for index in indices.tolist())

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._files.starts[indices + 1] - self._files.starts[indices]

    def record_id(self, index: int) -> str:
        return self._files.names[checked(index, len(self))]

    def file_of(self, index: int) -> str:
        return self._files.path(checked(index, len(self)))

    def unit_names(self) -> Iterator[str | None]:
        return map(_folder, self.record_ids())


def _folder(name: str) -> str | None:
    """Return the first folder of a file's relative name; None if it lies in none."""
    folder, slash, _ = os.fsencode(name).partition(b"/")
    # The unit must not depend on the locale.
    return folder.decode("utf-8", "surrogateescape") if slash else None


def text_contents(files: Files, folder: str) -> tuple[str, np.ndarray]:
    """Hash the files' contents, hex, private; and list those that cannot be read, int64, rising.

    The hash is the same whichever of them that are. It is made anew once one can be read.
    """
    words = cached_words(
        os.path.join(folder, f"{TEXTS_VERSION}-{files.place_hash}.npy"),
        lambda write: _write_texts(write, files),
        lambda words: len(words) >= DIGEST_WORDS,
        lambda words: not any(is_readable(files, int(i)) for i in words[DIGEST_WORDS:]),
    )
    return digest_hex(words[:DIGEST_WORDS]), words[DIGEST_WORDS:]


def _write_texts(write: WriteWords, files: Files) -> None:
    digest, unreadable = read_contents(files, skip_unreadable=True)
    write(np.frombuffer(digest, dtype="<i8"))
    write(np.array(unreadable, dtype=np.int64))


def _explain(path: str, text_field: str) -> str:
    return foreign(path, ".txt") or (
        "convert them (iconv -f LATIN1 -t UTF-8, if they are Latin-1), or name text files by a glob"
    )


TEXT = Format(
    open=TextRecords,
    below=("**",),
    row="file",
    found_in="file",
    record="one file",
    content="UTF-8 text",
    explain=_explain,
    named_by_position=False,
    has_stdlib=True,
)
