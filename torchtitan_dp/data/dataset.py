"""The data of a run: records, their units, and the split into training and held-out units."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torchtitan_dp.data.readable import (
    Census,
    Wanted,
    refuse_unnamed,
    refuse_unreadable,
    take_census,
    wanted_fields,
    warnings,
)
from torchtitan_dp.data.records.format import Format
from torchtitan_dp.data.records.formats import format_named, open_store
from torchtitan_dp.data.records.index import writable_folder
from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.units import Units, open_units, split, word


@dataclass(frozen=True)
class Records:
    """The data of a run: records, their units, and the split into training and held-out units."""

    store: RecordStore
    units: Units
    train: np.ndarray
    heldout: np.ndarray
    fingerprint: str  # private
    settings: Mapping[str, object]  # by key; the fingerprint depends on them
    warnings: tuple[str, ...]  # about records without usable content; private

    @classmethod
    def open(
        cls,
        format: str,
        path: str,
        *,
        text_field: str = "text",
        prompt_field: str | None = None,
        messages_field: str | None = None,
        unit_field: str | None = None,
        heldout_fraction: float = 0.0,
        needs_heldout: bool = False,
        number_is_secret: bool = False,
        in_groups: bool = False,
    ) -> "Records":
        """Open records, group them by unit, and hold some units out.

        Args:
            format, path: `training.dataset` and `training.dataset_path`.
            text_field, unit_field: the fields of the text and of the unit (`formats.open_store`).
            prompt_field, messages_field: the field beside the text, or in its place, that
                `conversations` reads; in a format whose records have fields.
            heldout_fraction: the share of units to hold out, by a hash of their ids.
            needs_heldout: whether holding out no unit is an error, or a warning where
                `number_is_secret`.
            number_is_secret: whether neighbouring data sets differ in their number of units, as
                with a public `privacy.sample_rate`.
            in_groups: whether units take turns in groups, by a hash of their names.

        Raises:
            ValueError: one line, also if there is nothing to train on.
        """
        if not path:
            raise ValueError(
                "training.dataset_path is not set: give a file, a directory or a glob "
                "('python-stdlib' to try)"
            )
        if number_is_secret and unit_field is None:
            _refuse_names_by_position(format, heldout_fraction, in_groups)
        beside = {"prompt_field": prompt_field, "messages_field": messages_field}
        fields = {key: field for key, field in beside.items() if field is not None}
        facts = format_named(format)
        for key, field in fields.items():
            if not facts.fields:
                raise ValueError(
                    f"data.{key} = {field!r}: {format} files have no fields; use "
                    "training.dataset = 'jsonl', or remove it"
                )
        wanted = wanted_fields(text_field, prompt_field, messages_field)
        keys = {one.field: one.key for one in wanted}
        store = open_store(format, path, text_field=text_field, unit_field=unit_field, keys=keys)
        units, census = _group(store, facts, unit_field, wanted)
        refuse_unnamed(store, facts, units, unit_field, wanted, census)
        if census is not None:
            refuse_unreadable(store, facts, wanted, census)
        train, heldout = split(units, heldout_fraction)
        assert len(train) > 0, "neither a store nor a split is empty"
        lacks_heldout = needs_heldout and len(heldout) == 0
        none = (
            f"data.heldout_fraction = {heldout_fraction}: holds out none of "
            f"{len(units)} {word(unit_field)}s, but validation.enable = true"
        )
        if lacks_heldout and not number_is_secret:
            raise ValueError(f"{none}; raise it")
        read_by = (text_field, *(f"{key} {field}" for key, field in fields.items()))
        terms: tuple[object, ...] = (store.fingerprint, heldout_fraction, *read_by)
        if unit_field is not None:
            terms += (unit_field, units.fingerprint)
        fingerprint = hashlib.sha256(repr(terms).encode()).hexdigest()
        settings: dict[str, object] = {
            "data.unit_field": unit_field,
            "data.heldout_fraction": heldout_fraction,
            "data.text_field": text_field,
            "data.prompt_field": prompt_field,
            "data.messages_field": messages_field,
            "data.verify_records": "contents",
        }
        found = warnings(store, facts, units, unit_field, wanted, census, len(train))
        if store.notice is not None:
            found += (store.notice,)
        if lacks_heldout:  # a refusal would show whether a unit that is held out is there
            found += (f"{none}, so held-out losses are nan; raise it",)
        return cls(store, units, train, heldout, fingerprint, settings, found)


def _group(
    store: RecordStore, facts: Format, unit_field: str | None, wanted: tuple[Wanted, ...]
) -> tuple[Units, Census | None]:
    """Group records by unit, and count the records with each wanted field."""
    if not facts.fields:
        return open_units(store, unit_field), None
    folder, begun = writable_folder(None), Census()
    units = open_units(store, unit_field, count=begun.counter(wanted, unit_field))
    try:
        return units, take_census(store, wanted, unit_field, folder, begun)
    except OSError as error:
        raise ValueError(
            f"training.dataset_path: its lines cannot be counted ({error}): check the records' "
            f"permissions and the space left in {folder!r}"
        ) from error


def _refuse_names_by_position(format: str, heldout_fraction: float, in_groups: bool) -> None:
    """Refuse a format in which one more record would change which others are held out, or in which
    group they are."""
    facts = format_named(format)
    if facts.named_by_position and in_groups:
        raise ValueError(
            f"privacy.noise = 'banded': with a public privacy.sample_rate, one {format} "
            f"{facts.row} more would change which {facts.row}s take turns together; set "
            "data.unit_field, or remove privacy.sample_rate"
        )
    if facts.named_by_position and heldout_fraction > 0:
        raise ValueError(
            f"data.heldout_fraction = {heldout_fraction}: with a public privacy.sample_rate, one "
            f"{format} {facts.row} more would change which {facts.row}s are held out; keep "
            "held-out records in another file and set it to 0, or remove privacy.sample_rate"
        )
