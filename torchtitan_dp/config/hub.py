"""Names on the Hugging Face hub in the place of folders, fetched once into the hub's own cache.

`owner/name` is a model, unless this machine has a folder `owner`: then the hub is not asked, and
learns no local path. `hf://datasets/owner/name/PATH` are files of a data set. `@REVISION` may
follow the name. Without it a run stays at the revision that its first start found: the name of the
cache's folder, which run_config.json keeps. HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE work
as everywhere.
"""

import os
import re
from pathlib import Path

from torchtitan_dp.base.process import progress

_NAME = r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w.-]+))?"
_MODEL, _RECORDS = re.compile(_NAME), re.compile(rf"hf://datasets/{_NAME}(?:/(.*))?")
_SNAPSHOT = re.compile(r"/(model|dataset)s--([\w.-]+)/snapshots/([0-9a-f]{40})")
# `privacy.json`: weights always come with their ledger.
_SETTINGS = [
    "config.json",
    "generation_config.json",
    "chat_template*",
    "*token*.json",
    "privacy.json",
]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def model_folder(key: str, name: str, run_config: str, *, weights: bool) -> str:
    """Return the folder of a model, fetched if `name` is one on the hub, of the revision in the
    file `run_config` if there is one; ValueError, one line, if it cannot be."""
    found = _MODEL.fullmatch(name)
    if found is None:
        return name
    wanted = [*_SETTINGS, *(_WEIGHTS if weights else ())]
    return _snapshot(f"{key} = '{name}'", "model", found, wanted, run_config, others=["*/*"])


def records_path(name: str, run_config: str) -> str:
    """Return the path of records on the hub, fetched, as `model_folder`."""
    found = _RECORDS.fullmatch(name)
    if found is None or ".." in name or (found[3] or "").startswith("/"):
        raise ValueError(
            f"training.dataset_path = '{name}': write hf://datasets/owner/name, or "
            "hf://datasets/owner/name/PATH"
        )
    path = found[3] or ""
    wanted = [path, f"{path.rstrip('/')}/*"] if path else None
    folder = _snapshot(f"training.dataset_path = '{name}'", "dataset", found, wanted, run_config)
    return os.path.join(folder, path) if path else folder


def _snapshot(
    setting: str,
    kind: str,
    name: re.Match[str],
    wanted: list[str] | None,
    run_config: str,
    others: list[str] | None = None,
) -> str:
    repo, revision, *_ = name.groups()
    kept = Path(run_config).read_text("utf-8") if os.path.isfile(run_config) else ""
    pinned = {(kind, of): at for kind, of, at in _SNAPSHOT.findall(kept)}
    revision = revision or pinned.get((kind, repo.replace("/", "--")))
    progress(f"looking for {repo} on the Hugging Face hub…")
    import huggingface_hub  # here: a name on the hub is rare, and this takes a third of a second

    before = os.umask(0o077)
    if kind == "model":  # records alone are their owner's
        os.umask(before)
    try:
        return huggingface_hub.snapshot_download(
            repo, repo_type=kind, revision=revision, allow_patterns=wanted, ignore_patterns=others
        )
    except (OSError, ValueError) as error:
        why = f"the Hugging Face hub refuses it ({type(error).__name__}); log in (hf auth login)"
        if isinstance(error, huggingface_hub.errors.LocalEntryNotFoundError):
            offline = huggingface_hub.constants.HF_HUB_OFFLINE
            reason = "HF_HUB_OFFLINE is set" if offline else "no hub answers"
            why = f"the Hugging Face hub's cache lacks it, and {reason}"
        raise ValueError(
            f"{setting}: no such path here, and {why}; name a folder, or run hf download {repo} "
            f"--repo-type {kind} where there is a network"
        ) from error
    finally:
        os.umask(before)
