"""Public and private text that a machine with this project has, and the split of the private one.

Public: Python's documentation (pydoc's topics, docstrings) and the sources of its standard library.
Private: the sources of one company's installed packages, Hugging Face's; one file is a unit. A
folder is held out as a whole, so that no held-out file has siblings in training.

Leaks are looked for by lines: a private file that is another's copy, or that shares lines with the
standard library, is left out; so is a held-out file half of whose lines a training file has, too.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("transformers", "huggingface_hub", "datasets", "tokenizers", "safetensors")
HELDOUT_FRACTION = 0.2  # of folders
LEAST_CHARACTERS = 300  # of a private file: shorter ones are mostly empty __init__.py
MOST_SHARED_WITH_PUBLIC = 0.2  # of a private file's telling lines
MOST_SHARED_WITH_TRAINING = 0.5  # of a held-out file's telling lines
PIECE_CHARACTERS = 6000  # of public text: a sample's worth, about 2,048 tokens
LEAST_DOCSTRING = 100
_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
_NOT_TEXT |= {"encodings", "lib2to3", "ensurepip", "__pycache__"}
TELLING_LENGTH = 25


def build(folder: Path) -> dict[str, object]:
    """Write `public.jsonl`, `private/` and `heldout/` into `folder`; what they hold, as a record.

    A folder that has a `corpus.json` already is left as it is.
    """
    told = folder / "corpus.json"
    if told.exists():
        found: dict[str, object] = json.loads(told.read_text())
        return found
    folder.mkdir(parents=True, exist_ok=True)
    documents, sources = list(documentation()), list(standard_library())
    pieces = list(cut(documents)) + list(cut(sources))
    with open(folder / "public.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces)
    private, without = private_files(telling(sources))
    train, heldout = split(private)
    heldout, like_training = without_siblings(heldout, train)
    for name, texts in (("private", train), ("heldout", heldout)):
        shutil.rmtree(folder / name, ignore_errors=True)
        for path, text in texts.items():
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    content: dict[str, object] = {
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "public_pieces": len(pieces),
        "public_documentation_bytes": sum(map(len, documents)),
        "public_source_bytes": sum(map(len, sources)),
        "private_files": len(train),
        "heldout_files": len(heldout),
        "left_out": {**without, "held out and like training": like_training},
    }
    told.write_text(json.dumps(content, indent=1) + "\n")
    return content


def documentation() -> Iterator[str]:
    """Yield pydoc's topics, and each standard module's docstrings."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for text in standard_library():
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED)]
        except (SyntaxError, ValueError):
            continue
        found = [ast.get_docstring(node) or "" for node in nodes]
        if told := "\n\n".join(d for d in found if len(d) >= LEAST_DOCSTRING):
            yield told


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def standard_library() -> Iterator[str]:
    """Yield the running Python's own modules, without its tests."""
    for _, text in _sources(Path(sysconfig.get_paths()["stdlib"]), _NOT_TEXT):
        yield text


def private_files(public: set[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the packages' files, path -> text, and how many were left out for what reason.

    Args:
        public: the telling lines of the standard library.
    """
    kept: dict[str, str] = {}
    without = {"short": 0, "copies": 0, "like the standard library": 0}
    seen: set[str] = set()
    root = Path(sysconfig.get_paths()["purelib"])
    for package in PACKAGES:
        for path, text in _sources(root / package, {"__pycache__"}):
            if len(text) < LEAST_CHARACTERS:
                without["short"] += 1
            elif text in seen:
                without["copies"] += 1
            elif shared(telling([text]), public) > MOST_SHARED_WITH_PUBLIC:
                without["like the standard library"] += 1
            else:
                seen.add(text)
                kept[f"{package}/{path}"] = text
    return kept, without


def split(files: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Part files into those to train on and to hold out, by a hash of their folder's name."""
    held = {path for path in files if _hash(os.path.dirname(path)) < HELDOUT_FRACTION}
    train = {path: text for path, text in files.items() if path not in held}
    return train, {path: files[path] for path in files if path in held}


def without_siblings(heldout: dict[str, str], train: dict[str, str]) -> tuple[dict[str, str], int]:
    """Leave out held-out files that have too many lines of the training files; and how many."""
    lines = telling(train.values())
    kept = {
        path: text
        for path, text in heldout.items()
        if shared(telling([text]), lines) <= MOST_SHARED_WITH_TRAINING
    }
    return kept, len(heldout) - len(kept)


def telling(texts: Iterable[str]) -> set[str]:
    """Collect the lines that say whose they are: long ones, and no comments."""
    stripped = (line.strip() for text in texts for line in text.splitlines())
    return {s for s in stripped if len(s) >= TELLING_LENGTH and not s.startswith("#")}


def shared(lines: set[str], others: set[str]) -> float:
    """Return the share of `lines` that the others have, too."""
    return len(lines & others) / max(len(lines), 1)


def cut(texts: Iterable[str]) -> Iterator[str]:
    """Join texts and cut them into pieces of `PIECE_CHARACTERS`; the last may be shorter."""
    whole = "\n\n".join(texts)
    for start in range(0, len(whole), PIECE_CHARACTERS):
        yield whole[start : start + PIECE_CHARACTERS]


def _sources(root: Path, without: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the Python files below `root` in a fixed order: relative path, text."""
    for place, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - without)
        for name in sorted(names):
            path = Path(place) / name
            if name.endswith(".py"):
                try:
                    yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
                except UnicodeError:
                    continue


def _hash(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
