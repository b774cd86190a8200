"""The ledger on disk: `privacy.json`, the steps ever begun, and the fingerprint of the data.

Guarantee:
    `steps_executed.log` has a line, synced before the update, for every step ever begun in this
    dump folder, with its noise, rate and start: lost and abandoned ones too. Nothing is computed
    from what records hold; the fingerprint, which is (from their names, sizes and contents), has a
    file of its own that is never published.
"""

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.caveats import recorded
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.ledger.starts import Stretch, new_name, worst_terms
from torchtitan_dp.process import Fault, private_opener, write_atomically

PRIVACY_FILE = "privacy.json"
EXECUTED_FILE = "steps_executed.log"
FINGERPRINT_FILE = "data_fingerprint.private"
_TORN = "torn"


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
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(os.path.join(folder, PRIVACY_FILE), text.encode())


def ledger_of(content: dict[str, Any]) -> Ledger:
    """Return the ledger that the content of a `privacy.json` tells of.

    Raises:
        KeyError, TypeError, IndexError, AssertionError: it is none of ours.
    """
    *finished, current = content["segments"]
    *finished_starts, start = content["starts"] or [{"name": new_name(), "steps": 0}]
    ledger = Ledger.from_fields(
        {name: content.get(name) for name in schema.names(schema.Origin.LEDGER)}
        | {"settings": current["settings"], "finished": finished}
        | {"caveats": recorded(content["caveats"])}
        | {"start": start["name"], "finished_starts": finished_starts}
    )
    assert ledger.segments()[-1].steps == current["steps"], "its segments and steps disagree"
    assert ledger.starts()[-1].steps == start["steps"], "its starts and steps disagree"
    return ledger


class ExecutedSteps:
    """Keep every step begun in a folder, a line `step sigma rate start` each, appended only.

    Of a step of estimated norms the line ends in the number of projections.
    """

    def __init__(self, folder: str) -> None:
        """Read the file, if there is one.

        Raises:
            ValueError: if the file is not one of ours.
        """
        self._start = new_name()
        self._path = os.path.join(folder, EXECUTED_FILE)
        self._begun: Counter[tuple[str, float, float, int]] = Counter()
        self._adopted = 0  # of them, steps of checkpoints that came without their log
        self._torn = 0  # lines whose terms were lost: counted on the worst terms
        self._torn_name = ""  # of their own in each folder: copies may tear at different steps
        self._tail_is_torn = False
        self._size = 0  # in bytes, as this object read or left it
        if os.path.exists(self._path):
            self._read()

    @property
    def count(self) -> int:
        """Count the steps ever begun."""
        return self._begun.total() + self._torn

    def new_start(self) -> str:
        """Draw the name of the steps that begin from now on: at each start, and at each load."""
        self._start = new_name()
        return self._start

    def begin(self, step: int, settings: Settings) -> None:
        """Record, durably, that `step`'s update is about to happen. Call on one rank."""
        terms = settings.noise_multiplier, settings.sample_rate
        self._append(step, Stretch(self._start, *terms, 1, settings.projections))

    def adopt(self, lineage: Iterable[Stretch]) -> None:
        """Add the steps of a checkpoint that came without (all of) its log. Call on one rank."""
        for stretch in lineage:
            missing = self._missing(stretch)
            if missing > 0:
                self._append(0, dataclasses.replace(stretch, steps=missing))

    def unlogged(self, lineage: Iterable[Stretch]) -> int:
        """Count the steps of a lineage that were taken elsewhere, without a line here before them.

        More may have been begun there, and lost. A torn line may stand for one of them.
        """
        return max(self._adopted + sum(map(self._missing, lineage)) - self._torn, 0)

    def _missing(self, stretch: Stretch) -> int:
        """Count the steps of a stretch that have no line here."""
        return max(stretch.steps - self._begun[stretch.which], 0)

    def _append(self, step: int, stretch: Stretch) -> None:
        """Write and sync a line for each step; `step` is 0 where it was begun elsewhere."""
        start, sigma, rate, k = stretch.which
        estimated = f" {k}" if k else ""
        line = f"{step} {sigma!r} {rate!r} {start}{estimated}\n" * stretch.steps
        # A torn last line was begun too, and must neither swallow the next nor pass for whole.
        content = (f" {_TORN}\n" * self._tail_is_torn + line).encode()
        is_new = not os.path.exists(self._path)
        with open(self._path, "ab", opener=private_opener) as file:
            if os.fstat(file.fileno()).st_size != self._size:  # the lock was removed, or is none
                raise Fault(
                    f"{self._path} was changed since this run read it: another run writes to the "
                    "same job.dump_folder, or the file was edited; end the other run, and start "
                    "this one again"
                )
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(os.path.dirname(self._path))
        self._tail_is_torn = False
        self._size += len(content)
        self._begun[stretch.which] += stretch.steps
        self._adopted += stretch.steps * (step == 0)

    def begun(self, settings: Settings) -> list[Stretch]:
        """Return all steps ever begun, by start.

        Torn lines are taken for steps of a start of their own, on the worst of all known terms and
        of `settings`.
        """
        found = [
            Stretch(start, sigma, rate, steps, k)
            for (start, sigma, rate, k), steps in self._begun.items()
        ]
        if self._torn:
            known = [(s.noise_multiplier, s.sample_rate, s.projections) for s in found]
            known.append((settings.noise_multiplier, settings.sample_rate, settings.projections))
            sigma, rate, k = worst_terms(known)
            found.append(Stretch(self._torn_name, sigma, rate, self._torn, k))
        return found

    def _read(self) -> None:
        """Read all lines, and count those that were torn by a crash."""
        with open(self._path, "rb") as file:
            content = file.read()
        self._size = len(content)
        self._tail_is_torn = content != b"" and not content.endswith(b"\n")
        lines = content.decode("ascii", errors="replace").splitlines()
        last_torn = 0
        for number, line in enumerate(lines, start=1):
            if line.endswith(_TORN) or (self._tail_is_torn and number == len(lines)):
                self._torn += 1
                last_torn = number
            else:
                step, start, sigma, rate, k = self._parse(line, number)
                self._begun[start, sigma, rate, k] += 1
                self._adopted += step == 0
        if last_torn:
            so_far = "\n".join(lines[:last_torn]).removesuffix(f" {_TORN}")
            so_far = os.path.realpath(self._path) + so_far
            self._torn_name = f"{_TORN} {hashlib.sha256(so_far.encode()).hexdigest()[:16]}"

    def _parse(self, line: str, number: int) -> tuple[int, str, float, float, int]:
        """Return the step, the start, sigma, the rate and the projections of a line."""
        try:
            step, sigma, rate, start, *rest = line.split()
            (projections,) = rest or ("0",)
            return int(step), start, float(sigma), float(rate), int(projections)
        except ValueError:
            raise ValueError(
                f"{self._path}, line {number}: '{line[:40]}' is no step; restore the file, or use "
                "another job.dump_folder"
            ) from None


def read_fingerprint(folder: str) -> str | None:
    """Return the fingerprint of the records that this folder's run was started with, if any."""
    path = os.path.join(folder, FINGERPRINT_FILE)
    if not os.path.exists(path):
        return None
    with open(path, encoding="ascii") as file:
        return file.readline().strip()


def check_fingerprint(folder: str, fingerprint: str, settings: Mapping[str, object]) -> None:
    """Refuse other data than the run was started with; a first start has nothing to compare.

    Args:
        settings: that the fingerprint depends on besides the records, by their keys.

    Raises:
        ValueError: naming the key that changed and the remedy.
    """
    before = read_fingerprint(folder)
    if before is None or before == fingerprint:
        return
    afresh = "or start afresh in another job.dump_folder"
    earlier = _read_settings(folder)
    if not earlier:
        raise ValueError(
            "training.dataset_path: the records (or data.unit_field, heldout_fraction, a field of "
            "text, prompts or messages, or verify_records) are not those that this run was started "
            f"with; restore them, {afresh}"
        )
    for key, value in settings.items():
        if key in earlier and earlier[key] != value:
            raise ValueError(
                f"{key} = {value!r}: this run was started with {earlier[key]!r}, on "
                f"which its samples depend; set it back, {afresh}"
            )
    raise ValueError(
        "training.dataset_path: the records are not those that this run was started with: a file "
        f"was added, removed, renamed or changed; restore them, {afresh}"
    )


def write_fingerprint(folder: str, fingerprint: str, settings: Mapping[str, object]) -> None:
    """Keep the fingerprint, and on a second line the settings: private data, never published."""
    lines = f"{fingerprint}\n{json.dumps(dict(settings))}\n"
    write_atomically(os.path.join(folder, FINGERPRINT_FILE), lines.encode())


def _read_settings(folder: str) -> dict[str, object]:
    """Return the settings beside the fingerprint; none of them in a file of one line.

    Raises:
        ValueError: if the second line is not ours.
    """
    path = os.path.join(folder, FINGERPRINT_FILE)
    with open(path, encoding="ascii") as file:
        _, *rest = file.read().splitlines()
    try:
        settings = json.loads(rest[0]) if rest else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}, line 2: no settings; restore the file as the run wrote it")
    return settings


def _sync_folder(folder: str) -> None:
    """Sync a folder: a new file's name is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
