"""Units of records that several people own: letters, contracts, threads.

Records with the same set of owners are candidates together. The largest candidate is taken first,
of equal ones that with the least hash, each if none of its owners is in one that was taken. The
records of others are left out.

Guarantee:
    - Each owner is in one unit at most, and all records of a unit have the same owners: without all
      that one of them owns, the unit is empty, and a clipped sum moves by C at most
      (docs/proofs.md, "Several owners").
    - Units follow from the owners' names alone, which are public under `zero_out`. A record that
      names nobody, or somebody illegibly, is a unit of its own and reads as nothing.
"""

import hashlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan_dp.data.files import MOST_ITEMS, Fields
from torchtitan_dp.data.formats import unit_name
from torchtitan_dp.data.store import HASH_BYTES, Units, group, spelling_hash, unit_hash

COMMON = 0.1
"""The share of records from which on an owner is reported: a doctor, perhaps, or a mailing list."""


def owners_of(fields: Fields, by: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the names in each of the fields `by`, a text, a whole number or a list of them; an
    empty one names nobody. None if one holds something else."""
    found: dict[str, list[str]] = {}
    for field in by:
        value = fields.get(field)
        values = value if isinstance(value, list) else [value]
        names = [unit_name(one) for one in values if one is not None and one != ""]
        if len(values) >= MOST_ITEMS or None in names:  # readers leave out what follows
            return None
        found[field] = [name for name in names if name is not None]
    return found


class Owners:
    """The owners of records, which are entered in order."""

    def __init__(self, by: Sequence[str], not_owners: Collection[str]) -> None:
        self._records = dict.fromkeys(by, 0)  # that name somebody there
        self._others = dict.fromkeys(not_owners, 0)
        self._people: dict[str, int] = {}
        self._owners, self._counts = array("q"), array("q")  # of all records in a row; of each

    def enter(self, fields: Fields) -> bytes | None:
        """Enter a record, and return a hash of the set of its owners; None if it has none."""
        every = owners_of(fields, list(self._records)) or {}
        for field, found in every.items():
            self._records[field] += found != []
        names = {name for found in every.values() for name in found}
        for name in names & self._others.keys():
            self._others[name] += 1
        owners = sorted(names - self._others.keys())
        for name in owners:
            self._owners.append(self._people.setdefault(name, len(self._people)))
        self._counts.append(len(owners))
        if len(owners) < 2:
            return unit_hash(owners[0]) if owners else None
        joined = b"".join(map(unit_hash, owners))
        return hashlib.blake2b(joined, digest_size=HASH_BYTES, person=b"owners").digest()

    def check(self) -> None:
        """Refuse, by ValueError in one line, fields and names that no record has."""
        key = "data.unit_field"
        for names in (self._records, self._others):
            if missing := [name for name, count in names.items() if count == 0]:
                raise ValueError(
                    f"{key} = {missing[0]!r}: no record names anybody so; spell it as records do, "
                    "or leave it out"
                )
            key = "data.not_owners"

    def units(self, hashes_R2: np.ndarray) -> Units:
        """Choose the units, by the hash of each record's set of owners, uint64 (records, 2)."""
        candidates = group(hashes_R2)
        records_C = np.diff(candidates.starts)
        first_C = candidates.members[candidates.starts[:-1]]
        ends_R = np.cumsum(self._counts)
        begins_C = (ends_R - self._counts)[first_C].tolist()
        ends_C = ends_R[first_C].tolist()
        is_taken, is_kept_C = bytearray(len(self._people)), np.zeros(len(candidates), dtype=bool)
        for one in np.argsort(-records_C, kind="stable").tolist():  # candidates rise by hash
            owners = self._owners[begins_C[one] : ends_C[one]]
            if not any(is_taken[owner] for owner in owners):
                is_kept_C[one] = True
                for owner in owners:
                    is_taken[owner] = 1
        starts = np.concatenate([[0], np.cumsum(records_C[is_kept_C])])
        members = candidates.members[np.repeat(is_kept_C, records_C)]
        return Units(members, starts, candidates.hashes[is_kept_C])

    def facts(self, units: Units) -> dict[str, Any]:
        """Count what the units leave out, and list the owners of many records. NOT PRIVATE."""
        counts_R = np.array(self._counts)
        people_U = counts_R[units.members[units.starts[:-1]]]
        of_each = np.bincount(np.array(self._owners), minlength=len(self._people))
        names, most = list(self._people), max(COMMON * len(counts_R), 10)
        common = [one for one in np.argsort(-of_each)[:5].tolist() if of_each[one] > most]
        return {
            "joined": sum("," in name or ";" in name for name in names),
            "left_out": len(counts_R) - len(units.members),
            "people": len(names),
            "in_units": int(people_U.sum()),
            "common": [[names[one], of_each[one] / len(counts_R)] for one in common],
        }

    def spellings(self) -> np.ndarray:
        """Return a hash of each owner's name that all its spellings share: uint64 (people,)."""
        hashed = (unit_hash(n)[:8] if len(n) > 256 else spelling_hash(n) for n in self._people)
        return np.frombuffer(b"".join(hashed), "<u8")


def described(facts: Mapping[str, Any], records: int) -> list[str]:
    """Describe `Owners.facts`, a line each. NOT PRIVATE."""
    lines = [
        f"{records - facts['left_out']:,} of {records:,} records are used: of the others, an owner "
        f"is in another unit; {facts['in_units']:,} of {facts['people']:,} owners are in a unit"
    ]
    if facts["joined"]:
        lines.append(
            f"{facts['joined']:,} owners have a comma or semicolon in their name: if these are "
            "several people's, write lists of names, else they are protected as one"
        )
    for name, share in facts["common"]:
        lines.append(
            f"{name!r} owns {share:.0%} of all records: if this is nobody to protect (a doctor, a "
            "mailing list), name it in data.not_owners, and fewer are left out"
        )
    return lines
