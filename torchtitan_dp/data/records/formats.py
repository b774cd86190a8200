"""The formats of private text records, and how a store of them is opened.

Stores keep offsets, never the records. `FORMATS` is the only place that knows formats by
name: a new one is a file with a store and its `Format`, and a line here.
"""

from torchtitan_dp.data.records.conversion import PLANNED
from torchtitan_dp.data.records.files import list_files, locate
from torchtitan_dp.data.records.index import writable_folder
from torchtitan_dp.data.records.jsonl import JSONL
from torchtitan_dp.data.records.record_format import Format
from torchtitan_dp.data.records.record_store import RecordStore
from torchtitan_dp.data.records.text import TEXT

FORMATS: dict[str, Format] = {"text": TEXT, "jsonl": JSONL}
FOLDER = "folder"  # the unit field of records without fields


def format_named(name: str) -> Format:
    """Look a format up by its name.

    Raises:
        ValueError: one line, if it is not known.
    """
    if name not in FORMATS:
        known = " or ".join(f"'{known}'" for known in FORMATS)
        if name not in PLANNED:
            raise ValueError(f"training.dataset = {name!r} is not a known format: use {known}")
        raise ValueError(
            f"training.dataset = {name!r} is not built yet: use {known}; to convert: "
            + PLANNED[name]
        )
    return FORMATS[name]


def open_store(
    format: str,
    path: str,
    *,
    text_field: str = "text",
    unit_field: str | None = None,
    index_folder: str | None = None,
) -> RecordStore:
    """Open the records of `training.dataset` = `format` at `training.dataset_path` = `path`.

    `text`: one file, one record; `path` is a file, a glob, a folder (all files below it), or
    "python-stdlib". `jsonl`: one line, one record; `path` is a file, a glob, or a folder of
    *.jsonl. Hidden files, `__pycache__` and .pyc are skipped; symbolic links are followed, but no
    folder is entered twice by them, and a file that links (to it or to a folder above it) name more
    than once is listed once, by its own name if that is listed, else by the first; of hard links,
    by the first.

    `unit_field` names a record's unit (`units`). For `jsonl` it is a field that holds a string
    or a whole number; 7 and "7" are one unit, else names must be equal character by character. A
    line where it is missing, empty or something else is a unit of its own and reads as `None`. For
    `text` it can only be "folder": the first folder below `path` (for a glob: below its part
    without wildcards). A file that lies in no folder there is a unit of its own and reads as
    `None`, too.

    All files are read once: to find the lines of jsonl files and to hash what files hold
    (`hashing`), so that the fingerprint depends on which content stands under which
    index. What was found is kept in `index_folder` (default: `$XDG_CACHE_HOME` or ~/.cache,
    torchtitan_dp/index) and found again while the files' absolute paths, sizes, times and inodes
    stay the same. A text file that cannot be read then (rights, a file that is gone) is a record
    that reads as nothing for as long as the store is open: it stops nothing, its digest is one
    public constant, and a rank that could read it would have another fingerprint.

    Raises `ValueError`, one line, for an unknown format, an empty text field, a unit field that
    the format has not, a path that is missing or cannot be listed or holds no record, a file that
    changes while it is read, an index folder that cannot be written.
    """
    facts = format_named(format)
    if facts.has_fields and not (isinstance(text_field, str) and text_field):
        raise ValueError(f"data.text_field = {text_field!r}: name the JSON field with the text")
    if not facts.has_fields and unit_field not in (None, FOLDER):
        raise ValueError(
            f"data.unit_field = {unit_field!r}: {format} files have no fields; use '{FOLDER}' (the "
            "first folder below training.dataset_path), or remove it: one file, one unit"
        )
    if unit_field == "":
        raise ValueError("data.unit_field = '': name the JSON field of the unit, or remove it")
    folder = writable_folder(index_folder)
    try:
        root, names = locate(path, facts.below, has_stdlib=facts.has_stdlib)
        files = list_files(root, names)
        store = facts.open(files, text_field, unit_field, folder)
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
