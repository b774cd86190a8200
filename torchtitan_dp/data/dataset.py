"""The data of a run: records, their units, and the split into training and held-out units."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from torchtitan_dp.data.learnable import Wanted, listed, wanted_fields
from torchtitan_dp.data.records.format import Format
from torchtitan_dp.data.records.formats import format_named, open_store
from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.units import Units, open_units, split, word

_FIRST_ROWS = 1000
"""Rows whose fields are named where none has a unit."""


@dataclass(frozen=True)
class Records:
    """The data of a run: records, their units, and the split into training and held-out units."""

    store: RecordStore
    facts: Format
    wanted: tuple[Wanted, ...]
    units: Units
    train: np.ndarray
    heldout: np.ndarray
    fingerprint: str  # private
    settings: Mapping[str, object]  # by key; the fingerprint depends on them
    warnings: tuple[str, ...]  # about records that contribute nothing; private

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
        units = open_units(store, unit_field)
        _refuse_unnamed(store, facts, units, unit_field)
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
        found = _unnamed_notice(store, facts, units, unit_field, len(train))
        if store.notice is not None:
            found += (store.notice,)
        if lacks_heldout:  # a refusal would show whether a unit that is held out is there
            found += (f"{none}, so held-out losses are nan; raise it",)
        return cls(store, facts, wanted, units, train, heldout, fingerprint, settings, found)


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


def _refuse_unnamed(
    store: RecordStore, facts: Format, units: Units, unit_field: str | None
) -> None:
    """Refuse a data set in which no record names its unit.

    Raises:
        ValueError: one line.
    """
    if unit_field is None or units.unnamed < len(store):
        return
    none = f"data.unit_field = {unit_field!r}: none of the {len(store)} records has one"
    if not facts.fields:
        raise ValueError(
            f"{none}: every file lies in no folder below training.dataset_path; give a path above "
            "the units' folders"
        )
    rows = [fields for fields in islice(store.all_fields(), _FIRST_ROWS) if fields is not None]
    if not rows:
        raise ValueError(
            f"training.dataset_path: none of the {len(store)} {facts.row}s is a {facts.content}; "
            f"{facts.explain(store.file_of(0), unit_field)}"
        )
    pointed = [value for row in rows if isinstance(value := row.get(unit_field), float)]
    if pointed:
        raise ValueError(
            f"{none}: they hold {repr(pointed[0])[:40]}, a number with a point; write "
            "whole numbers or strings (the number is not private)"
        )
    raise ValueError(
        f"{none}: name the {facts.fields} that holds the unit, a string or a whole number (not "
        f"private: their fields are {listed(name for row in rows for name in row)})"
    )


def _unnamed_notice(
    store: RecordStore, facts: Format, units: Units, unit_field: str | None, trained: int
) -> tuple[str, ...]:
    """Describe the records that name no unit. NOT PRIVATE: for `console.warn` alone.

    Args:
        trained: the number of units to train on.
    """
    if not units.unnamed:
        return ()
    lack = f"have no usable data.unit_field = {unit_field!r}"
    if not facts.fields:
        lack = "lie in no folder below training.dataset_path (data.unit_field = 'folder')"
    return (
        f"{units.unnamed} of {len(store)} {facts.row}s {lack}: each is a unit of its own that "
        "contributes nothing, and counts in the number of units, so that q and the delta check "
        f"are against {trained} units",
    )
