"""Attacks on the data room by one record or one setting, each of which worked once."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.data.stores import records_in, source, store_of
from torchtitan_dp.data.batching import Samples
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.formats import FORMATS, MOST_ROW_BYTES
from torchtitan_dp.data.prepare import prepared


def _arrow(path: Path, column: Any) -> Path:
    batch = pa.record_batch({"text": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return path


COLUMNS = {
    "one large text beside views": pa.array(
        ["the first", "x" * (MOST_ROW_BYTES + 1), "the third"], type=pa.string_view()
    ),
    "an index beyond its dictionary": pa.DictionaryArray.from_arrays(
        pa.array([0, 7, 1]), pa.array(["a", "b"]), safe=False
    ),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_one_value_is_broken_and_leaves_the_others(tmp_path, column):
    store = store_of(_arrow(tmp_path / "a.arrow", COLUMNS[column]), tmp_path, "arrow")
    assert (store.lengths() > 0).tolist() == [True, False, True]


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


def test_figures_count_all_tokens_of_answers(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "q" * 500, "text": "t" * 500}) + "\n")
    wanted = source(tmp_path, "jsonl", prompt_field="q")
    records = records_in(wanted, str(tmp_path / "store"))
    figures = records.figures(Samples(records.store, 16, has_answers=True))
    assert figures["tokens"] == records.store.lengths().sum()


def test_a_plan_of_one_unit(tmp_path):
    assert len(Records.empty(source(tmp_path, "jsonl"), 1, 0.0).train) == 1


def test_messages_whose_texts_are_codes_are_refused(tmp_path):
    """One text that is not UTF-8 would break all others of its dictionary."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["user", "assistant"]))
    turns = pa.StructArray.from_arrays([codes, codes], ["role", "content"])
    path = _arrow(tmp_path / "a.arrow", pa.ListArray.from_arrays(pa.array([0, 2]), turns))
    with pytest.raises(ValueError, match=r"data\.messages_field = 'text': .*dictionary"):
        FORMATS["arrow"].check(str(path), {"text": "data.messages_field"})
