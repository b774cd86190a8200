"""The names under which a run goes on in W&B and MLflow after a restart: random, and no secret."""

import json
import os
import secrets

from torchtitan_dp.process import write_atomically

FILE = "watch.json"


def name_of(folder: str, service: str) -> str | None:
    """Return the name that the run in `folder` has in a service, if it has one."""
    return _names(folder).get(service)


def keep_name(folder: str, service: str, name: str) -> None:
    """Keep a name for later starts."""
    content = json.dumps({**_names(folder), service: name}, indent=2)
    write_atomically(os.path.join(folder, FILE), content.encode() + b"\n")


def kept_name(folder: str, service: str) -> str:
    """Return the name in a service, drawn and kept at the first call."""
    name = name_of(folder, service)
    if name is None:
        name = secrets.token_hex(8)
        keep_name(folder, service, name)
    return name


def _names(folder: str) -> dict[str, str]:
    try:
        with open(os.path.join(folder, FILE), encoding="utf-8") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {}
