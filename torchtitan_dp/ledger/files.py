"""The ledger on disk: `privacy.json` and the fingerprint of the data.

Guarantee:
    Nothing in `privacy.json` is computed from the content of records, nor from how long steps took.
    The fingerprint, which is computed from names, sizes and contents, has a file of its own that is
    never published.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.caveats import recorded
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.steps import names_of_starts
from torchtitan_dp.process import write_atomically

PRIVACY_FILE = "privacy.json"
FINGERPRINT_FILE = "data_fingerprint.private"


def read_published(folder: str) -> Ledger | None:
    """Return the ledger that `privacy.json` in this folder tells of; None if there is none.

    Raises:
        ValueError: if the file is not one of ours.
    """
    content = read_published_fields(folder)
    return None if content is None else ledger_of(content)


def read_published_fields(folder: str) -> dict[str, Any] | None:
    """Return what `privacy.json` says; `ledger_of` makes a ledger of it.

    Raises:
        ValueError: if the file is not one of ours.
    """
    path = os.path.join(folder, PRIVACY_FILE)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
        schema.check(content)
        ledger_of(content)
    except (ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{path} cannot be read ({why}): restore it, go on with the version of torchtitan_dp "
            "that wrote it, or use another job.dump_folder"
        ) from error
    return content


def write_published(folder: str, content: Mapping[str, Any]) -> None:
    """Write `privacy.json` atomically.

    Args:
        content: from `schema.assemble`.
    """
    write_atomically(os.path.join(folder, PRIVACY_FILE), to_bytes(content))


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `privacy.json`."""
    return json.dumps(content, indent=2).encode() + b"\n"


def ledger_of(content: dict[str, Any]) -> Ledger:
    """Return the ledger that the content of a `privacy.json` tells of.

    Raises:
        KeyError, TypeError, IndexError, AssertionError: it is none of ours.
    """
    *finished, current = content["segments"]
    names = content.get("step_names")
    if names is None:  # version 0.1.0 listed them by start
        names = names_of_starts(content["starts"])
    fields = schema.names(schema.Origin.LEDGER)
    ledger = Ledger.from_fields(
        {name: content[name] for name in fields if name in content}
        | {"settings": current["settings"], "finished": finished}
        | {"caveats": recorded(content["caveats"])}
        | {"step_names": names}
    )
    assert ledger.segments()[-1].steps == current["steps"], "its segments and steps disagree"
    assert len(names.split()) == ledger.steps, "its step_names and steps disagree"
    return ledger


def read_fingerprint(folder: str) -> str | None:
    """Return the fingerprint of the records that this folder's run was started with, if any."""
    path = os.path.join(folder, FINGERPRINT_FILE)
    if not os.path.exists(path):
        return None
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def check_fingerprint(folder: str, fingerprint: str) -> None:
    """Refuse other data than the run was started with; a first start has nothing to compare.

    Raises:
        ValueError: naming the key and the remedy.
    """
    before = read_fingerprint(folder)
    if before is not None and before != fingerprint:
        raise ValueError(
            "training.dataset_path: the records (or data.unit_field, heldout_fraction, a field of "
            "text, prompts or messages, or verify_records) are not those that this run was started "
            "with; restore them, or start afresh in another job.dump_folder"
        )


def write_fingerprint(folder: str, fingerprint: str) -> None:
    """Keep the fingerprint: private data, never published."""
    write_atomically(os.path.join(folder, FINGERPRINT_FILE), fingerprint.encode() + b"\n")
