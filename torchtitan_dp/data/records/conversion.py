"""Commands that turn files of other formats into JSON lines, for messages."""

from pathlib import PurePath


def by_pandas(reader: str, stem: str) -> str:
    """Return the command that writes what `reader`, an expression, reads to `stem`.jsonl.

    >>> by_pandas("pd.read_csv('a.csv')", "a")[:36]
    'python -c "import pandas as pd; pd.r'
    """
    write = f"to_json('{stem}.jsonl', orient='records', lines=True, force_ascii=False)"
    return f'python -c "import pandas as pd; {reader}.{write}"'


PLANNED = {
    "parquet": by_pandas("pd.read_parquet('notes.parquet')", "notes"),
    "hf": by_pandas("__import__('datasets').load_from_disk('notes').to_pandas()", "notes"),
}
"""By names of formats that are not built yet."""

# The first bytes of another format, its name, and a command that converts it.
_FOREIGN = (
    (b"PAR1", "Parquet", lambda name, stem: by_pandas(f"pd.read_parquet('{name}')", stem)),
    (b"\x1f\x8b", "gzip", lambda name, stem: f"gunzip -c '{name}' > '{stem}.jsonl'"),
    (b"\x28\xb5\x2f\xfd", "zstd", lambda name, stem: f"zstd -dc '{name}' > '{stem}.jsonl'"),
    (b"[", "one JSON array", lambda name, stem: by_pandas(f"pd.read_json('{name}')", stem)),
)


def foreign(path: str) -> str | None:
    """Recognise another format by a file's first bytes, and describe how to convert it."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError:
        return None
    name = PurePath(path).name
    for magic, format, command in _FOREIGN:
        if head.startswith(magic):
            done = command(name, name.partition(".")[0])
            return f"{name!r} is {format}, not JSON lines; convert it: {done}"
    return None
