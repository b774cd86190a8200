"""The ledger on disk: `privacy.json` and the fingerprint of the data.

Guarantee:
    Nothing in `privacy.json` is computed from the content of records, nor from how long steps took.
    The fingerprint, which is computed from names, sizes and contents, has a file of its own that is
    never published.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.spending import recorded
from torchtitan_dp.process import write_atomically

PRIVACY_FILE = "privacy.json"
TRIAL_FILE = "trial.json"  # of a search's trial, from before its first start: the keys tried
FINGERPRINT_FILE = "data_fingerprint.private"


def read_published(folder: str) -> Lineage | None:
    """Return the ledger of this folder's `privacy.json`, if any; raise ValueError if it is not
    ours."""
    content = read_published_fields(folder)
    return None if content is None else ledger_of(content)


def read_published_fields(folder: str) -> dict[str, Any] | None:
    """Return the content of this folder's `privacy.json`, if any; raise ValueError if it is not
    ours."""
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
            f"{path} cannot be read ({why}): restore it, use the version of torchtitan_dp "
            "that wrote it, or use another job.dump_folder"
        ) from error
    return content


def write_published(folder: str, content: Mapping[str, Any]) -> None:
    """Write `privacy.json`, from `schema.assemble`, atomically."""
    write_atomically(os.path.join(folder, PRIVACY_FILE), to_bytes(content))


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `privacy.json`."""
    return json.dumps(content, indent=2).encode() + b"\n"


def ledger_of(content: dict[str, Any]) -> Lineage:
    """Return the ledger of a `privacy.json` with this content.

    Raises:
        KeyError, TypeError, AssertionError: it is none of ours.
    """
    kept = {name: content.get(name) for name in schema.names(schema.Origin.LEDGER)}
    lineage = Lineage.from_fields(
        kept
        | {"settings": schema.terms_of(content), "caveats": recorded(content["caveats"])}
        | {"step_names": content["step_names"], "lost": content["steps_executed"] - kept["steps"]}
    )
    assert len(lineage.step_names.split()) == lineage.steps, "its step_names and steps disagree"
    return lineage


def read_fingerprint(folder: str) -> str | None:
    """Return the fingerprint of the records that this folder's run was started with, if any."""
    return next(iter(_lines(folder)), None)


def check_fingerprint(folder: str, fingerprint: str | None, settings: Mapping[str, object]) -> None:
    """Refuse other data than the run was started with; a first start has nothing to compare.

    Args:
        fingerprint: None compares the settings alone, before the records are read.
        settings: that the fingerprint depends on besides the records, by their keys.

    Raises:
        ValueError: naming the key that changed and the remedy.
    """
    lines = _lines(folder)
    if not lines or lines[0] == fingerprint:
        return
    afresh = "or start afresh in another job.dump_folder"
    try:
        earlier = dict(json.loads(lines[1]))
    except (ValueError, TypeError, IndexError):
        raise ValueError(
            f"{os.path.join(folder, FINGERPRINT_FILE)}, line 2: no settings; restore the file as "
            "the run wrote it"
        ) from None
    for key, value in settings.items():
        if key in earlier and earlier[key] != value:
            raise ValueError(
                f"{key} = {value!r}: this run was started with {earlier[key]!r}, on "
                f"which its samples depend; set it back, {afresh}"
            )
    if fingerprint is not None:
        raise ValueError(
            "training.dataset_path: the records are not those that this run was started with: a "
            f"file was added, removed, renamed or changed; restore them, {afresh}"
        )


def write_fingerprint(
    folder: str, fingerprint: str, settings: Mapping[str, object], description: Sequence[str] = ()
) -> None:
    """Write the fingerprint, on a second line the settings, on a third what describes the records:
    private data, never published."""
    lines = "\n".join([fingerprint, json.dumps(dict(settings)), json.dumps([*description]), ""])
    write_atomically(os.path.join(folder, FINGERPRINT_FILE), lines.encode())


def read_description(folder: str) -> list[str]:
    """Return what describes the records of this folder's run, if that is there. NOT PRIVATE."""
    try:
        return [str(line) for line in json.loads(_lines(folder)[2])]
    except (OSError, ValueError, IndexError):
        return []


def _lines(folder: str) -> list[str]:
    path = os.path.join(folder, FINGERPRINT_FILE)
    if not os.path.exists(path):
        return []
    with open(path, encoding="ascii") as file:
        return file.read().splitlines()
