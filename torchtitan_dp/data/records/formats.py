"""The table of formats, and opening a store of one of them.

Stores keep offsets, never the records.
"""

from collections.abc import Mapping

from torchtitan_dp.data.records.files import list_files, locate
from torchtitan_dp.data.records.format import Format
from torchtitan_dp.data.records.index import writable_folder
from torchtitan_dp.data.records.jsonl import JSONL
from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.records.tables import HF, PARQUET
from torchtitan_dp.data.records.text import TEXT

FORMATS: dict[str, Format] = {"text": TEXT, "jsonl": JSONL, "parquet": PARQUET, "hf": HF}
FOLDER = "folder"  # the unit field of records without fields


def format_named(name: str) -> Format:
    """Look a format up by its name.

    Raises:
        ValueError: one line, if it is not known.
    """
    if name not in FORMATS:
        known = ", ".join(f"'{known}'" for known in FORMATS)
        raise ValueError(f"training.dataset = {name!r} is not a known format: use one of {known}")
    return FORMATS[name]


def open_store(
    format: str,
    path: str,
    *,
    text_field: str = "text",
    unit_field: str | None = None,
    keys: Mapping[str, str] | None = None,
    index_folder: str | None = None,
) -> RecordStore:
    """Open the records of `training.dataset` = `format` at `training.dataset_path` = `path`.

    `path` is a file, a glob, a folder (all files below it that match the format's pattern), or
    "python-stdlib" (text). Hidden files, `__pycache__` and .pyc are skipped. Symbolic links are
    followed, but no folder is entered twice by them. A file with several names, by links to it or
    to a folder above it, is listed once: by its own name if that is listed, else by the first.

    `unit_field` names a record's unit (`units`). In a format with fields it is a field that holds a
    string or a whole number; 7 and "7" are one unit, other names are equal only character by
    character. In a format without, it is "folder": the first folder below `path` (for a glob: below
    its part without wildcards). A record without a unit is a unit of its own and reads as None.

    `keys` has the fields that a run reads besides the unit, each with its key of the configuration;
    by default `text_field` alone. A format with columns decodes no others.

    All files are read once, to find records and to hash contents (`hashing`), on which the
    fingerprint depends. The result is kept in `index_folder` (default: `$XDG_CACHE_HOME` or
    ~/.cache, torchtitan_dp/index) while the files' absolute paths, sizes, times and inodes stay the
    same.

    Raises:
        ValueError: one line; an unknown format, an empty text field, a unit field that the format
            has not, a path that is missing or cannot be listed or holds no record, a file that
            changes while it is read, an index folder that cannot be written.
    """
    facts = format_named(format)
    if facts.fields and not (isinstance(text_field, str) and text_field):
        raise ValueError(f"data.text_field = {text_field!r}: name the {facts.fields} with the text")
    if not facts.fields and unit_field not in (None, FOLDER):
        raise ValueError(
            f"data.unit_field = {unit_field!r}: {format} files have no fields; use '{FOLDER}' (the "
            "first folder below training.dataset_path), or remove it: one file, one unit"
        )
    if unit_field == "":
        raise ValueError(f"data.unit_field = '': name the {facts.fields} of the unit, or remove it")
    folder = writable_folder(index_folder)
    keys = dict(keys or {text_field: "data.text_field"})
    if unit_field is not None:
        keys[unit_field] = "data.unit_field"
    try:
        root, names = locate(path, facts.below, has_stdlib=facts.has_stdlib)
        files = list_files(root, names)
        store = facts.open(files, text_field, unit_field, folder, keys=keys)
    except OSError as error:
        raise ValueError(
            f"training.dataset_path = {path!r} cannot be listed or indexed ({error}): check "
            f"its permissions and the space left in {folder!r}"
        ) from error
    if len(store) == 0:
        raise ValueError(
            f"training.dataset_path = {path!r} holds no record: it needs at least one "
            f"{facts.found_in} (a glob must match files, not folders; '**' matches any depth)"
        )
    return store
