"""The format "jsonl": one line, one record, a JSON object with the text in one of its fields."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import IO

import numpy as np

from torchtitan_dp.data.records.files import Files
from torchtitan_dp.data.records.format import FieldRecords, Format, fingerprint, foreign
from torchtitan_dp.data.records.hashing import DIGEST_WORDS, digest_hex, read_contents
from torchtitan_dp.data.records.index import WriteWords, cached_words
from torchtitan_dp.data.records.store import Fields

MAX_LINE_BYTES = 16 * 2**20  # JSON is parsed whole, in up to 30 times its size
CHUNK = 2**16
LINES_VERSION = "hashed-lines-1"  # of the index's format and name


class JsonlRecords(FieldRecords):
    """Lines of files."""

    most_row_bytes = MAX_LINE_BYTES

    def __init__(
        self, files: Files, text_field: str, unit_field: str | None, index_folder: str, **_: object
    ) -> None:
        # (records + 1,)
        self._bounds, hashed = line_bounds(files, index_folder)
        super().__init__(files, text_field, unit_field, np.searchsorted(self._bounds, files.starts))
        lines = hashlib.sha256(self._bounds.data).hexdigest()  # in which order they are
        self.fingerprint = fingerprint("jsonl", files, lines, hashed)
        self.place_hash = f"jsonl-{files.place_hash}"

    def _row(self, file_index: int, row: int) -> Fields | None:
        index = int(self._first[file_index]) + row
        begin, end = int(self._bounds[index]), int(self._bounds[index + 1])
        try:
            with open(self._files.path(file_index), "rb") as file:
                file.seek(begin - int(self._files.starts[file_index]))
                return _read_object(file, end - begin)
        except OSError:
            return None

    def stored_bytes(self, indices: np.ndarray) -> np.ndarray:
        return self._bounds[indices + 1] - self._bounds[indices]

    def all_fields(self) -> Iterator[Fields | None]:
        for file_index in range(len(self._files)):
            first, last = (int(x) for x in self._first[file_index : file_index + 2])
            with open(self._files.path(file_index), "rb") as file:
                for start in range(first, last, CHUNK):
                    stop = min(start + CHUNK, last)
                    for size in np.diff(self._bounds[start : stop + 1]).tolist():
                        yield _read_object(file, size)


def _read_object(file: IO[bytes], size: int) -> Fields | None:
    """Read the JSON object on the next line, of `size` bytes, and pass the line in any case."""
    if size > MAX_LINE_BYTES:
        file.seek(size, os.SEEK_CUR)
        return None
    line = file.read(size)
    try:
        value = json.loads(line.decode("utf-8-sig")) if len(line) == size else None
    except (ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def line_bounds(files: Files, folder: str) -> tuple[np.ndarray, str]:
    """Find, in one pass, where lines begin and end, and hash the files' contents.

    Returns:
        (records + 1,) int64 bounds, as if all files lay one after the other; and the contents'
        hash, hex, private.
    """
    words = cached_words(
        os.path.join(folder, f"{LINES_VERSION}-{files.place_hash}.npy"),
        lambda write: _write_bounds(write, files),
        lambda words: words[0] == 0 and words[-DIGEST_WORDS - 1] == files.starts[-1],
    )
    return words[:-DIGEST_WORDS], digest_hex(words[-DIGEST_WORDS:])


def _write_bounds(write: WriteWords, files: Files) -> None:
    def take(index: int, newlines: np.ndarray, is_last: bool) -> None:
        begin, end = (int(x) for x in files.starts[index : index + 2])
        write(begin + 1 + newlines)
        if is_last and end > begin and (len(newlines) == 0 or newlines[-1] != end - begin - 1):
            write(np.array([end]))  # a last line that no newline ends

    write(np.zeros(1))
    digest, _ = read_contents(files, scan=lambda block: np.flatnonzero(block == 0x0A), take=take)
    write(np.frombuffer(digest, dtype="<i8"))


def _explain(path: str, text_field: str) -> str:
    if (found := foreign(path, ".jsonl")) is not None:
        return found
    name = PurePath(path).name
    stem = name.partition(".")[0]
    with open(path, "rb") as file:
        first = next(filter(None, map(bytes.strip, iter(lambda: file.readline(CHUNK), b""))), b"")
    if first.startswith(b"["):
        return (
            f'{name!r} is one JSON array; convert it: python -c "import pandas as pd; '
            f"pd.read_json('{name}').to_json('{stem}_lines.jsonl', orient='records', lines=True, "
            'force_ascii=False)"'
        )
    if first.startswith(b"{"):
        return (
            f"an object of {name!r} goes on over several lines; write one a line: jq -c . '{name}' "
            f"> '{stem}_lines.jsonl'"
        )
    return f"'jsonl' needs one a line, {{\"{text_field}\": …}}"


JSONL = Format(
    open=JsonlRecords,
    below=("**", "*.jsonl"),
    row="line",
    found_in="line in a *.jsonl file",
    record="one line of a JSON Lines file",
    named_by_position=True,
    fields="JSON field",
    content="JSON object",
    explain=_explain,
)
