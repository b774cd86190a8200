"""The ledger on disk: `privacy.json`, the steps ever begun, and the fingerprint of the data.

Guarantee:
    `steps_executed.log` has a line, synced before the update, for every step ever begun in this
    dump folder, with its noise and rate: lost and abandoned ones too. Nothing here is computed
    from what records hold; the fingerprint, which is (from their names and sizes), has a file of
    its own that is never published.
"""

import json
import os
from collections import Counter
from typing import Any

from torchtitan_dp.ledger.lineage import Ledger, Settings
from torchtitan_dp.privacy.segments import Segment as Mechanism

PRIVACY_FILE = "privacy.json"
EXECUTED_FILE = "steps_executed.log"
FINGERPRINT_FILE = "data_fingerprint.private"
_TORN = "torn"


def read_published(folder: str) -> Ledger | None:
    """The ledger that `privacy.json` in this folder tells of; None if there is none.

    Raises:
        ValueError: if the file is not one of ours.
    """
    path = os.path.join(folder, PRIVACY_FILE)
    if not os.path.exists(path):
        return None
    try:
        return ledger_of(read_published_fields(folder))
    except (ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
        raise ValueError(
            f"{path} cannot be read ({error!r}): restore it, or use another job.dump_folder"
        ) from error


def read_published_fields(folder: str) -> dict[str, Any]:
    """What `privacy.json` says, as it stands there."""
    with open(os.path.join(folder, PRIVACY_FILE), encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


def ledger_of(content: dict[str, Any]) -> Ledger:
    """From what `privacy.json` holds. Raises KeyError or the like if it is not one of ours."""
    *finished, current = content["segments"]
    names = ("steps", "private", "caveats", "ancestors", "budget", "adaptive", "run", "config_hash")
    ledger = Ledger.from_fields(
        {name: content[name] for name in names}
        | {"settings": current["settings"], "finished": finished}
    )
    assert ledger.segments()[-1].steps == current["steps"], "its segments and steps disagree"
    return ledger


class ExecutedSteps:
    """Counts every step begun in a folder, in an append-only file: `step sigma rate` a line."""

    def __init__(self, folder: str) -> None:
        """
        Raises:
            ValueError: if the file is not one of ours.
        """
        self._path = os.path.join(folder, EXECUTED_FILE)
        self._by_terms: Counter[tuple[float, float]] = Counter()
        self._torn = 0  # lines whose terms were lost: counted on the worst terms
        self._tail_is_torn = False
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                content = file.read()
            self._tail_is_torn = content != b"" and not content.endswith(b"\n")
            lines = content.decode("ascii", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if line.endswith(_TORN) or (self._tail_is_torn and number == len(lines)):
                    self._torn += 1
                else:
                    self._by_terms[self._parse(line, number)] += 1

    @property
    def count(self) -> int:
        return self._by_terms.total() + self._torn

    def begin(self, step: int, settings: Settings) -> None:
        """Record, durably, that `step`'s update is about to happen. Call on one rank."""
        terms = settings.noise_multiplier, settings.sample_rate
        line = f"{step} {terms[0]!r} {terms[1]!r}\n"
        # A torn last line was begun too, and must neither swallow the next nor pass for whole.
        line = f" {_TORN}\n" * self._tail_is_torn + line
        with open(self._path, "ab", opener=_private_opener) as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._tail_is_torn = False
        self._by_terms[terms] += 1

    def segments(self, settings: Settings) -> list[Mechanism]:
        """By terms; torn lines on the worst of all terms and `settings`."""
        counts = Counter(self._by_terms)
        if self._torn:
            known = [*counts, (settings.noise_multiplier, settings.sample_rate)]
            counts[min(sigma for sigma, _ in known), max(rate for _, rate in known)] += self._torn
        return [Mechanism(sigma, rate, n) for (sigma, rate), n in sorted(counts.items())]

    def _parse(self, line: str, number: int) -> tuple[float, float]:
        try:
            step, sigma, rate = line.split()
            int(step)
            return float(sigma), float(rate)
        except ValueError:
            raise ValueError(
                f"{self._path}, line {number}: '{line[:40]}' is no step; restore the file, or use "
                "another job.dump_folder"
            ) from None


def read_fingerprint(folder: str) -> str | None:
    """The fingerprint of the records that this folder's run was started with."""
    path = os.path.join(folder, FINGERPRINT_FILE)
    if not os.path.exists(path):
        return None
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def check_fingerprint(folder: str, fingerprint: str) -> None:
    """Refuse other data than the run was started with; nothing to compare at a first start.

    Raises:
        ValueError: naming the key and the remedy.
    """
    before = read_fingerprint(folder)
    if before is not None and before != fingerprint:
        raise ValueError(
            "training.dataset_path: the records (or data.unit_field, heldout_fraction or "
            "text_field) are not those that this run was started with (fingerprint "
            f"{fingerprint[:12]}, was {before[:12]}); restore them, or start "
            "afresh in another job.dump_folder"
        )


def write_fingerprint(folder: str, fingerprint: str) -> None:
    """Keep the fingerprint: private data, never published."""
    write_atomically(os.path.join(folder, FINGERPRINT_FILE), fingerprint.encode() + b"\n")


def write_atomically(path: str, content: bytes) -> None:
    """Replace the file by `content` whole, readable by its owner only, or leave it as it was."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb", opener=_private_opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
