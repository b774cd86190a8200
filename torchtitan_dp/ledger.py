"""What a run has spent: the ledger that goes into checkpoints and into `privacy.json`.

Guarantee:
    `epsilon` and `steps` are those of the weights' own lineage. `steps_executed` counts every step
    ever begun in this dump folder, lost and abandoned ones too, from a file that is synced before
    each update. "Not private" is never undone. Nothing here is computed from what records hold:
    the fingerprint of the data, which is (from their names and sizes), has a file of its own.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.privacy import accounting

PRIVACY_FILE = "privacy.json"
EXECUTED_FILE = "steps_executed.log"
FINGERPRINT_FILE = "data_fingerprint.private"


@dataclass(frozen=True)
class Settings:
    """What the guarantee depends on; fixed at a run's first start."""

    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float
    delta: float
    expected_batch_size: int
    accountant: accounting.Accountant
    sample_rate_source: str
    neighbouring_relation: str
    privacy_unit: str = "record"

    def epsilon(self, steps: int) -> float:
        """Spent after `steps` optimizer steps; infinite where there is no noise."""
        return accounting.epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=steps,
            delta=self.delta,
            accountant=self.accountant,
        )

    def refuse_change(self, since: "Settings") -> None:
        """Raise ValueError, naming both values, if the guarantee's terms differ from `since`."""
        keys = {
            "noise_multiplier": "privacy.noise_multiplier",
            # Before the rate, which may follow from it: the key that was edited is named.
            "expected_batch_size": "training.global_batch_size",
            "sample_rate": "privacy.sample_rate",
            "max_grad_norm": "privacy.max_grad_norm",
            "delta": "privacy.delta",
            "neighbouring_relation": "privacy.sample_rate",
            "privacy_unit": "data.unit_field",
        }
        for attribute, key in keys.items():
            now, before = getattr(self, attribute), getattr(since, attribute)
            if now != before:
                raise ValueError(
                    f"{key} = {now}: this run was started with {before}; set it back, or start "
                    "afresh in another job.dump_folder"
                )


@dataclass
class Ledger:
    """The account of one lineage of weights."""

    settings: Settings
    steps: int = 0
    private: bool = True
    caveats: list[str] = dataclasses.field(default_factory=list)

    def mark_not_private(self, why: str) -> None:
        """For good: it survives resume."""
        self.private = False
        if why not in self.caveats:
            self.caveats.append(why)

    def inherit(self, earlier: "Ledger") -> None:
        """What was said of weights stays said of those that go on from them."""
        self.private = self.private and earlier.private
        self.caveats = list(dict.fromkeys([*self.caveats, *earlier.caveats]))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        fields: dict[str, Any] = json.loads(text)
        return cls(settings=Settings(**fields.pop("settings")), **fields)

    def publish(
        self, folder: str, steps_executed: int, newest_checkpoint: int = 0
    ) -> dict[str, Any]:
        """Write `privacy.json` atomically; returns what it says.

        The file speaks for every checkpoint in the folder: where an earlier branch of the run
        left one that is further than these weights, `newest_checkpoint`, its steps are told.
        """
        settings = self.settings
        steps = max(self.steps, newest_checkpoint)
        steps_executed = max(steps_executed, steps)
        content = {
            "private": self.private,
            "epsilon": settings.epsilon(steps) if self.private else None,
            "delta": settings.delta,
            "accountant": settings.accountant,
            "noise_multiplier": settings.noise_multiplier,
            "max_grad_norm": settings.max_grad_norm,
            "sample_rate": settings.sample_rate,
            "sample_rate_source": settings.sample_rate_source,
            "steps": steps,
            "steps_executed": steps_executed,
            "epsilon_executed": settings.epsilon(steps_executed) if self.private else None,
            "expected_batch_size": settings.expected_batch_size,
            "privacy_unit": settings.privacy_unit,
            "neighbouring_relation": settings.neighbouring_relation,
            "caveats": self.caveats,
        }
        write_atomically(
            os.path.join(folder, PRIVACY_FILE), json.dumps(content, indent=2).encode() + b"\n"
        )
        return content


def read_published(folder: str) -> Ledger | None:
    """The ledger that `privacy.json` in this folder tells of; None if there is none.

    Raises:
        ValueError: if the file is not one of ours.
    """
    path = os.path.join(folder, PRIVACY_FILE)
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        names = [f.name for f in dataclasses.fields(Settings)]
        return Ledger(
            settings=Settings(**{name: content[name] for name in names}),
            steps=content["steps"],
            private=content["private"],
            caveats=content["caveats"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error!r}): restore it, or use another job.dump_folder"
        ) from error


def summary(spent: dict[str, Any]) -> list[str]:
    """For people: what `privacy.json` says."""
    epsilon = f"epsilon = {spent['epsilon']:.4f}" if spent["private"] else "NOT private"
    return [
        f"done: {spent['steps']} steps",
        f"privacy: {epsilon}, delta = {spent['delta']:g} "
        f"(sigma = {spent['noise_multiplier']:.4f}, q = {spent['sample_rate']:.5f}, "
        f"C = {spent['max_grad_norm']:g}, {spent['accountant']}; unit: one "
        f"{spent['privacy_unit']}; neighbours: {spent['neighbouring_relation']})",
        *(f"caveat: {caveat}" for caveat in spent["caveats"]),
    ]


class ExecutedSteps:
    """Counts every step begun in a folder, in an append-only file."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, EXECUTED_FILE)
        self.count = 0
        self._is_torn = False
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                content = file.read()
            # A torn last line was begun too, and must not swallow the next.
            self._is_torn = content != b"" and not content.endswith(b"\n")
            self.count = content.count(b"\n") + self._is_torn

    def begin(self, step: int) -> None:
        """Record, durably, that `step`'s update is about to happen. Call on one rank."""
        with open(self._path, "ab", opener=_private_opener) as file:
            file.write(b"\n" * self._is_torn + f"{step}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        self._is_torn = False
        self.count += 1


def check_fingerprint(folder: str, fingerprint: str) -> None:
    """Refuse other data than the run was started with; nothing to compare at a first start.

    Raises:
        ValueError: naming the key and the remedy.
    """
    path = os.path.join(folder, FINGERPRINT_FILE)
    if os.path.exists(path):
        with open(path, encoding="ascii") as file:
            before = file.read().strip()
        if before != fingerprint:
            raise ValueError(
                "training.dataset_path: the records are not those that this run was started with "
                f"(fingerprint {fingerprint[:12]}, was {before[:12]}); restore them, or start "
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
