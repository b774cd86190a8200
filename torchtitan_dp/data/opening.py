"""The data of a run, as its configuration names it, and what its units are called."""

import hashlib
from dataclasses import dataclass

import numpy as np

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.records import RecordStore, open_records
from torchtitan_dp.data.split import split
from torchtitan_dp.data.units import Units, open_units


@dataclass(frozen=True)
class Records:
    """The data of a run: which units are trained on, which are held out."""

    store: RecordStore
    units: Units
    train: np.ndarray
    heldout: np.ndarray
    fingerprint: str  # private

    @classmethod
    def open(cls, config: JobConfig) -> "Records":
        """Raises ValueError, one line, if there is nothing to train on."""
        path = config.training.dataset_path
        if not path:
            raise ValueError(
                "training.dataset_path is not set: give a file, a directory or a glob "
                "('python-stdlib' to try)"
            )
        data, format = config.data, config.training.dataset
        store = open_records(
            format,
            path,
            text_field=data.text_field,
            unit_field=data.unit_field,
            contents=data.verify_records == "contents",
        )
        units = open_units(store, data.unit_field)
        train, heldout = split(units, data.heldout_fraction)
        if len(train) == 0:
            raise ValueError(
                f"data.heldout_fraction = {data.heldout_fraction}: holds out all "
                f"{len(units)} {noun(config)}s; lower it"
            )
        if config.validation.enable and len(heldout) == 0:
            raise ValueError(
                f"data.heldout_fraction = {data.heldout_fraction}: holds out none of "
                f"{len(units)} {noun(config)}s, but validation.enable = true; raise it"
            )
        terms: tuple[object, ...] = (store.fingerprint, data.heldout_fraction, data.text_field)
        if data.unit_field is not None:
            terms += (data.unit_field, units.fingerprint)
        return cls(store, units, train, heldout, hashlib.sha256(repr(terms).encode()).hexdigest())


def noun(config: JobConfig) -> str:
    """What is drawn, clipped and protected, in a word."""
    return "record" if config.data.unit_field is None else "unit"


def privacy_unit(config: JobConfig) -> str:
    """As `privacy.json` says it: "one ..."."""
    field = config.data.unit_field
    return "record" if field is None else f"unit of data.unit_field '{field}'"
