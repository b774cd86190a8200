"""Text to token ids: a Hugging Face tokenizer.json, or plain bytes.

The tokenizer is an input and is never learned from the private records (hazard row 34).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import tokenizers


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    bos_id: int | None
    eos_id: int | None
    identity: str
    """What ids depend on besides the text: equal for two folders with the same tokenizer."""

    def encode(self, text: str) -> np.ndarray | None:
        """Turn a text into token ids, int64 (tokens,), without beginning or end marks.

        `None` for a text without tokens in the vocabulary. Never raises, whatever the text.
        """
        ...

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Turn each text into ids as `encode` does, on all cores."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text, special tokens left out."""
        ...

    def get_vocab_size(self) -> int:
        """Return the largest id plus one, added tokens included."""
        ...

    def describe(self) -> str:
        """Name it, its size and its marks."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255: public, learned from nothing."""

    bos_id: int | None = 256
    eos_id: int | None = 257
    identity = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes, int64 (bytes,)."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text, with marks left out and broken UTF-8 replaced by U+FFFD."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")

    def get_vocab_size(self) -> int:
        """Return 258."""
        return 258

    def describe(self) -> str:
        return "bytes, vocabulary 258, bos 256, eos 257"


class HFTokenizer:
    """A tokenizer.json without its truncation, padding, dropout and special-token templates."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None):
        backend.no_truncation()  # both would otherwise hide the true length of a record
        backend.no_padding()
        if getattr(backend.model, "dropout", None):  # BPE's: other tokens each time, on each rank
            backend.model.dropout = None
        self._backend = backend
        self.bos_id, self.eos_id = bos_id, eos_id
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        hashed = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.identity = f"{hashed}, bos {bos_id}, eos {eos_id}"

    def encode(self, text: str) -> np.ndarray | None:
        """Turn a text into token ids, int64 (tokens,), without beginning or end marks.

        `None` for a text with something that the vocabulary lacks, if it has no token for that.
        """
        return self.encode_each([text])[0]

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Turn each text into ids as `encode` does, in the library's own threads."""
        try:
            # Unlike `encode`, it lets other threads of Python run.
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            # The library raises plain Exception; a panic inside of it is a BaseException that
            # cannot be imported. A record's content must not stop the run, nor touch another's.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if len(texts) == 1:
                return [None]
            half = len(texts) // 2
            return self.encode_each(texts[:half]) + self.encode_each(texts[half:])
        return [np.array(encoded.ids, dtype=np.int64) for encoded in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text, special tokens left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def get_vocab_size(self) -> int:
        """Return the largest id plus one, added tokens included (holes are possible)."""
        return self._vocab_size

    def describe(self) -> str:
        marks = [
            f"{name} {self._backend.id_to_token(mark)} ({mark})"
            if mark is not None
            else f"no {name}"
            for name, mark in (("bos", self.bos_id), ("eos", self.eos_id))
        ]
        return f"tokenizer.json, vocabulary {self._vocab_size:,}, {', '.join(marks)}"


def text_of(value: object) -> str | None:
    """Return a value if it is text that UTF-8 can encode: JSON may hold half a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeError:
        return None
    return value


def kind_of(value: object) -> str:
    """Name the type of a value in a field, with its article."""
    kinds = {bool: "a truth value", int: "a number", float: "a number", list: "a list"}
    kinds |= {dict: "an object", type(None): "null", bytes: "text that is broken or too long"}
    kinds[str] = "text with half a character"
    if text_of(value) is not None:
        return "a text"
    return kinds.get(type(value), f"a {type(value).__name__}")


def from_hub(path: str) -> str | None:
    """Describe how to download a model, if a path is spelled like one of the Hugging Face hub's.

    >>> from_hub("meta-llama/Llama-3.2-1B")[:56]
    'if it is a model of the Hugging Face hub, run hf downloa'
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        return None
    folder = f"models/{path.partition('/')[2]}"
    return (
        f"if it is a model of the Hugging Face hub, run hf download {path} --local-dir {folder} "
        f"and name {folder}"
    )


def load_tokenizer(assets_path: str) -> Tokenizer:
    """Load the tokenizer of the folder `model.hf_assets_path`: its tokenizer.json, else bytes.

    The beginning and end marks are those that tokenizer_config.json names, else
    special_tokens_map.json, else none. An empty path means bytes.

    Raises `ValueError` for a folder that does not exist, a broken file in it, a vocabulary without
    a mark that is named.
    """
    if not assets_path:
        return ByteTokenizer()
    if not os.path.isdir(assets_path):
        remedy = from_hub(assets_path) or (
            "give one with a tokenizer.json, or one without for bytes"
        )
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r} is not an existing folder: {remedy}"
        )
    path = os.path.join(assets_path, "tokenizer.json")
    if not os.path.exists(path):
        _refuse_bytes(assets_path)
        return ByteTokenizer()
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: its tokenizer.json cannot be loaded "
            f"({error}): download it again"
        ) from error
    return HFTokenizer(
        backend, *(_mark_id(backend, assets_path, key) for key in ("bos_token", "eos_token"))
    )


def _refuse_bytes(assets_path: str) -> None:
    """Refuse a folder without tokenizer.json that has weights, or a tokenizer in another form."""
    others = {"tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt"}
    weights = (".safetensors", ".bin", ".pth")
    names = sorted(os.listdir(assets_path))
    found = [name for name in names if name in others] or [n for n in names if n.endswith(weights)]
    if found:
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: it has {found[0]} and no tokenizer.json, so "
            "that text would be read as bytes; write one: python -c "
            '"from transformers import AutoTokenizer; '
            f"AutoTokenizer.from_pretrained('{assets_path}').save_pretrained('{assets_path}')\""
        )


def _mark_id(backend: tokenizers.Tokenizer, assets_path: str, key: str) -> int | None:
    for file_name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = os.path.join(assets_path, file_name)
        if not os.path.exists(path):
            continue
        problem = f"model.hf_assets_path = {assets_path!r}: its {file_name} "
        try:
            with open(path, encoding="utf-8") as file:
                mark = json.load(file).get(key)
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{problem}is not a JSON object: download it again") from error
        if isinstance(mark, dict):  # the older form: {"content": "<s>", "lstrip": false, ...}
            mark = mark.get("content")
        if not mark:
            continue
        token_id = backend.token_to_id(mark) if isinstance(mark, str) else None
        if token_id is None:
            raise ValueError(
                f"{problem}names the {key} {mark!r}, which tokenizer.json lacks: take both files "
                "from one model"
            )
        return token_id
    return None
