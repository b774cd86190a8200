"""Attacks on the data room by one record or one setting, each of which worked once."""

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.stores import source
from torchtitan_dp.data.formats import FORMATS, MOST_ROW_BYTES
from torchtitan_dp.data.prepare import prepared


def _arrow(path: Path, column: Any) -> Path:
    batch = pa.record_batch({"text": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return path


def test_row68_a_large_message_breaks_no_other_of_its_views(tmp_path):
    """Rows of views share buffers, and so a size."""
    turn = pa.struct([("role", pa.string()), ("content", pa.string_view())])
    texts = ["the first", "x" * (MOST_ROW_BYTES + 1), "the third"]
    chats = [[{"role": "user", "content": text}] for text in texts]
    path = _arrow(tmp_path / "a.arrow", pa.array(chats, type=pa.list_(turn)))
    found = [row and row["text"] for row in FORMATS["arrow"].rows(str(path), ["text"])]
    assert [found[0], found[2]] == [chats[0], chats[2]]


def test_tokens_never_become_records(tmp_path):
    """Where their store lies among the files, which may be refused."""
    (tmp_path / "a.txt").write_text("a text")
    for _ in range(2):
        with contextlib.suppress(ValueError):
            assert len(prepared(source(tmp_path), str(tmp_path / "store"))) == 1


def test_messages_whose_texts_are_codes_are_refused(tmp_path):
    """One text that is not UTF-8 would break all others of its dictionary."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["user", "assistant"]))
    turns = pa.StructArray.from_arrays([codes, codes], ["role", "content"])
    path = _arrow(tmp_path / "a.arrow", pa.ListArray.from_arrays(pa.array([0, 2]), turns))
    with pytest.raises(ValueError, match=r"data\.messages_field = 'text': .*dictionary"):
        FORMATS["arrow"].check(str(path), {"text": "data.messages_field"})
