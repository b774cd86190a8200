"""Tokenizers: bytes, and a Hugging Face tokenizer.json built here."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from torchtitan_dp.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer


def save_tokenizer(folder: Path, **files: Any) -> str:
    """A word tokenizer that, left to itself, adds <s>, cuts to 3 tokens and pads to 3."""
    vocabulary = {"<unk>": 0, "one": 1, "two": 2, "<s>": 3, "</s>": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["added"])  # id 5
    marks = [("<s>", 3)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=marks)
    backend.enable_truncation(3)
    backend.enable_padding(length=3, pad_id=0)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def encoded(tokenizer: Tokenizer, *texts: str) -> list[list[int] | None]:
    return [None if ids is None else ids.tolist() for ids in tokenizer.encode_each(texts)]


def test_a_text_has_the_same_tokens_each_time(tmp_path: Path) -> None:
    """BPE dropout draws merges anew."""
    model = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert encoded(load_tokenizer(str(tmp_path)), *["ab" * 10] * 20) == [[2] * 10] * 20


class Backend:
    """A library that fails on one text, as `tokenizers` or its Rust does."""

    model = None

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> list[Any]:
        self.calls += 1
        if "worst" in texts:
            raise self.error("worst")
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]

    def to_str(self) -> str:
        return ""

    def __getattr__(self, _: str) -> Any:
        return lambda **options: {}


@pytest.mark.parametrize("error", [Exception, type("PanicException", (BaseException,), {})])
def test_a_text_that_the_library_fails_on_is_none_and_touches_no_other(error: Any) -> None:
    """A panic arrives as a BaseException that cannot be imported."""
    for worst in range(33):
        backend = Backend(error)
        texts = ["worst" if i == worst else f"text {i}" for i in range(33)]
        tokenizer = HFTokenizer(backend, None, None)  # type: ignore[arg-type]
        expected = [None if text == "worst" else list(text.encode()) for text in texts]
        assert encoded(tokenizer, *texts) == expected
        assert backend.calls < 15  # not one by one
    tokenizer = HFTokenizer(Backend(KeyboardInterrupt), None, None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):  # the process's own
        tokenizer.encode_each(["text", "worst"])


def test_equal_tokenizers_have_one_identity_and_others_another(tmp_path: Path) -> None:
    for place in "abcd":
        (tmp_path / place).mkdir()
        save_tokenizer(tmp_path / place)
    (tmp_path / "c/tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    path = tmp_path / "d/tokenizer.json"
    path.write_text(path.read_text().replace('"one"', '"eno"'))
    found = [load_tokenizer(str(tmp_path / place)).identity for place in "abcd"]
    assert found[0] == found[1]
    assert len({*found, ByteTokenizer.identity}) == 4


def test_hugging_face_adds_cuts_and_pads_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    assert load_tokenizer(str(tmp_path)) is tokenizer  # a start asks for it several times
    for text, ids in (("one two one two what", [1, 2, 1, 2, 0]), ("one", [1]), ("", [])):
        assert encoded(tokenizer, text) == [ids]
    assert tokenizer.decode([3, 1, 2, 4]) == "one two"


def test_vocabulary_size_counts_added_tokens_and_holes(tmp_path: Path) -> None:
    assert load_tokenizer(save_tokenizer(tmp_path)).get_vocab_size() == 6
    path = tmp_path / "tokenizer.json"
    path.write_text(re.sub(r'"two":\s*2', '"far": 99', path.read_text()))
    assert load_tokenizer(str(tmp_path)).get_vocab_size() == 100


CONFIG, MAP = "tokenizer_config", "special_tokens_map"


@pytest.mark.parametrize(
    "files, expected",
    [
        ({CONFIG: {"bos_token": "<s>", "eos_token": "</s>"}}, (3, 4)),
        ({CONFIG: {"bos_token": {"content": "<s>"}, "eos_token": None}}, (3, None)),
        ({MAP: {"eos_token": {"content": "</s>"}}}, (None, 4)),
        ({}, (None, None)),
        ({CONFIG: {"bos_token": "<s>"}, MAP: {"bos_token": "one", "eos_token": "</s>"}}, (3, 4)),
    ],
)
def test_marks(tmp_path: Path, files: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, **files))
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", "{", r"tokenizer\.json is broken"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is no JSON object"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json is no JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', r"eos_token '<end>', which"),
        ("special_tokens_map.json", '{"bos_token": 3}', r"bos_token 3, which"),
    ],
)
def test_broken_files_and_no_folder(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = save_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^model\.hf_assets_path = .*{message}.*\Z"):
        load_tokenizer(path)
    for place in (tmp_path / "nowhere", tmp_path / name):
        with pytest.raises(ValueError, match=r"^model\.hf_assets_path = .*: no such folder"):
            load_tokenizer(str(place))
