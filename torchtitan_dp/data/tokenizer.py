"""Text to token ids: a Hugging Face tokenizer.json, or plain bytes.

The tokenizer is an input and is never learned from the private records (hazard row 34).
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers

from torchtitan_dp.data.files import require_folder

TOKENIZER, SETTINGS, _MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255: public, learned from nothing."""

    bos_id: int | None = 256
    eos_id: int | None = 257
    identity = "bytes"

    def encode(self, text: str) -> np.ndarray | None:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], *, marked: bool = False) -> str:
        """Turn ids into text, broken UTF-8 replaced by U+FFFD; `marked`: bos and eos too."""
        marks = {256: b"<bos>" * marked, 257: b"<eos>" * marked}
        text = b"".join(bytes([i]) if i < 256 else marks.get(i, b"") for i in map(int, ids))
        return text.decode("utf-8", "replace")

    def get_vocab_size(self) -> int:
        return 258

    def describe(self) -> str:
        return "bytes, vocabulary 258, bos 256, eos 257"


class HFTokenizer:
    """A tokenizer.json without its truncation, padding, dropout and special-token templates.
    `identity` names all that decides ids besides the text, equal for equal tokenizers."""

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
        """Turn a text into int64 ids without marks; None if the vocabulary lacks something."""
        return self.encode_each([text])[0]

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Turn each text into ids as `encode` does, in the library's own threads."""
        try:
            # Unlike `encode`, it lets other threads of Python run.
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            # The library raises plain Exception, or a panic: a BaseException that cannot be
            # imported. A record's content must not stop the run, nor touch another's.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if len(texts) == 1:
                return [None]
            half = len(texts) // 2
            return self.encode_each(texts[:half]) + self.encode_each(texts[half:])
        return [np.array(encoded.ids, dtype=np.int64) for encoded in found]

    def decode(self, ids: Iterable[int], *, marked: bool = False) -> str:
        """Turn ids into text; `marked`: special tokens too."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=not marked)

    def get_vocab_size(self) -> int:
        """Return the largest id plus one; holes are possible."""
        return self._vocab_size

    def describe(self) -> str:
        marks = [
            f"no {name}" if mark is None else f"{name} {self._backend.id_to_token(mark)} ({mark})"
            for name, mark in (("bos", self.bos_id), ("eos", self.eos_id))
        ]
        return f"tokenizer.json, vocabulary {self._vocab_size:,}, {', '.join(marks)}"


Tokenizer = ByteTokenizer | HFTokenizer


def text_of(value: object) -> str | None:
    """Return a value if it is text that UTF-8 can encode: JSON may hold half a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
        return value
    except UnicodeError:
        return None


def load_tokenizer(assets_path: str) -> Tokenizer:
    """Load the tokenizer of the folder `model.hf_assets_path`: its tokenizer.json, with the marks
    that tokenizer_config.json or special_tokens_map.json names; without one, or a path, bytes.
    Raises ValueError, one line, for a folder that does not exist, or a broken file."""
    if not assets_path:
        return ByteTokenizer()
    require_folder(assets_path)
    paths = [os.path.join(assets_path, name) for name in (TOKENIZER, SETTINGS, _MAP)]
    if os.path.exists(paths[0]):
        found = [os.stat(path) for path in paths if os.path.exists(path)]
        return _load(assets_path, tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in found))
    # Weights, or a tokenizer in another form.
    others = ".safetensors", ".bin", ".pth", ".model", "vocab.json", "merges.txt", "vocab.txt"
    if unread := sorted(name for name in os.listdir(assets_path) if name.endswith(others)):
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: it has {unread[0]} and no {TOKENIZER}, so "
            'that text would be read as bytes; write one: python -c "from transformers import '
            f"AutoTokenizer; AutoTokenizer.from_pretrained('{assets_path}')"
            f".save_pretrained('{assets_path}')\""
        )
    if not os.path.exists(os.path.join(assets_path, "config.json")):
        lacks = f"it has neither {TOKENIZER} nor config.json: name a model's folder"
        raise ValueError(f"model.hf_assets_path = {assets_path!r}: {lacks}")
    return ByteTokenizer()


@functools.lru_cache(maxsize=1)
def _load(assets_path: str, files: tuple[tuple[int, ...], ...]) -> HFTokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(os.path.join(assets_path, TOKENIZER))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: tokenizer.json is broken ({error}): reload it"
        ) from error
    marks = (_mark_id(backend, assets_path, key) for key in ("bos_token", "eos_token"))
    return HFTokenizer(backend, *marks)


def _mark_id(backend: tokenizers.Tokenizer, assets_path: str, key: str) -> int | None:
    for name in (SETTINGS, _MAP):
        if not (mark := read_settings(assets_path, name).get(key)):
            continue
        if isinstance(mark, str) and (token_id := backend.token_to_id(mark)) is not None:
            return token_id
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: its {name} names the {key} {mark!r}, which "
            f"{TOKENIZER} lacks: take both files from one model"
        )
    return None


def read_settings(assets_path: str, name: str) -> dict[str, Any]:
    """Read a JSON object in the folder of a tokenizer, with each special token as its text; empty
    if there is none. Raises ValueError, one line, for a file that is broken."""
    try:
        found = json.loads("{}" if (text := read_text(assets_path, name)) is None else text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: {name} is no JSON object: download it again"
        )
    for key, value in found.items():
        if key.endswith("_token") and isinstance(value, dict):
            found[key] = value.get("content")  # the older form, of {"content": "<s>", …}
    return found


def read_text(assets_path: str, name: str) -> str | None:
    """Read a file in the folder of a tokenizer; None if it is missing, ValueError if broken."""
    try:
        with open(os.path.join(assets_path, name), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.hf_assets_path = {assets_path!r}: {name} is broken ({error}): load it again"
        ) from None
