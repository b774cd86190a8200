"""Attacks on the data room by one record or one setting, each of which worked once."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.formats import FORMATS, MOST_ROW_BYTES
from torchtitan_dp.data.prepare import Source, prepared
from torchtitan_dp.data.reading import Reading
from torchtitan_dp.data.samples import Samples
from torchtitan_dp.data.tokenizer import ByteTokenizer


def _source(path: Path, format: str, prompt: str | None = None, unit: str | None = None) -> Source:
    return Source(format, str(path), Reading("text", prompt), ByteTokenizer(), unit)


def _write_arrow(path: Path, column: Any) -> None:
    batch = pa.record_batch({"text": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def test_a_prompt_that_is_the_unit_has_a_store_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"q": "question", "text": "answer"}) + "\n")
    without = prepared(_source(file, "jsonl", unit="q"), str(tmp_path / "store"))
    assert prepared(_source(file, "jsonl", "q", "q"), str(tmp_path / "store")).folder != (
        without.folder
    )


def test_one_large_text_beside_views_leaves_the_others(tmp_path: Path) -> None:
    texts = ["the first text", "x" * (MOST_ROW_BYTES + 1), "the third text"]
    _write_arrow(tmp_path / "a.arrow", pa.array(texts, type=pa.string_view()))
    store = prepared(_source(tmp_path / "a.arrow", "arrow"), str(tmp_path / "store"))
    assert (store.lengths() > 0).tolist() == [True, False, True]


def test_an_index_beyond_its_dictionary_is_one_broken_value(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 7, 1]), pa.array(["a", "b"]), safe=False)
    _write_arrow(tmp_path / "a.arrow", column)
    store = prepared(_source(tmp_path / "a.arrow", "arrow"), str(tmp_path / "store"))
    assert (store.lengths() > 0).tolist() == [True, False, True]


def test_a_csv_value_that_is_too_large_is_one_broken_row(tmp_path: Path) -> None:
    big = "x" * (MOST_ROW_BYTES + 1)
    (tmp_path / "a.csv").write_text(f"text\nfirst\n{big}\nthird\n")
    store = prepared(_source(tmp_path / "a.csv", "csv"), str(tmp_path / "store"))
    assert (store.lengths() > 0).tolist() == [True, False, True]


def test_tokens_never_become_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    source = _source(tmp_path, "text")
    counts = {}
    for start in range(2):
        try:
            counts[start] = len(prepared(source, str(tmp_path / "store")))
        except ValueError:  # or it is refused
            counts[start] = 1
    assert counts == {0: 1, 1: 1}


def test_figures_count_all_tokens_of_answers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "q" * 500, "text": "t" * 500}) + "\n")
    records = Records.open(_source(tmp_path, "jsonl", "q"), str(tmp_path / "store"))
    figures = records.figures(Samples(records.store, 16, has_answers=True))
    assert figures["tokens"] == records.store.lengths().sum()


def test_a_plan_of_one_unit(tmp_path: Path) -> None:
    assert len(Records.of_number(_source(tmp_path, "jsonl"), 1, 0.0).train) == 1


def test_messages_whose_texts_are_codes_are_refused(tmp_path: Path) -> None:
    """One text that is not UTF-8 would break all others of its dictionary."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["user", "assistant"]))
    turns = pa.StructArray.from_arrays([codes, codes], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 2]), turns)
    _write_arrow(tmp_path / "a.arrow", chats)
    check = {"text": "data.messages_field"}
    with pytest.raises(ValueError, match=r"data\.messages_field = 'text': .*dictionary"):
        FORMATS["arrow"].check(str(tmp_path / "a.arrow"), check)
