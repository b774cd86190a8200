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


def owners_of(
    fields: Fields, by: Sequence[str], not_owners: Collection[str]
) -> tuple[str, ...] | None:
    """Return the names in the fields `by`, texts, whole numbers or lists of them, sorted, without
    `not_owners`; None if there is no name, or something else than a name."""
    names = set[str]()
    for field in by:
        value = fields.get(field)
        found = value if isinstance(value, list) else [value]
        if len(found) >= MOST_ITEMS:  # readers leave out what follows
            return None
        for one in found:
            if one is None or one == "":  # nobody
                continue
            if (name := unit_name(one)) is None:
                return None
            names.add(name)
    return tuple(sorted(names - set(not_owners))) or None


class Owners:
    """The owners of records, which are entered in order."""

    def __init__(self) -> None:
        self._people: dict[str, int] = {}
        self._owners, self._counts = array("q"), array("q")  # of all records in a row; of each

    def enter(self, names: Sequence[str] | None) -> bytes | None:
        """Enter a record's owners, and return a hash of their set; None of none."""
        for name in names or ():
            self._owners.append(self._people.setdefault(name, len(self._people)))
        self._counts.append(len(names or ()))
        if not names:
            return None
        if len(names) == 1:
            return unit_hash(names[0])
        joined = b"".join(map(unit_hash, names))
        return hashlib.blake2b(joined, digest_size=HASH_BYTES, person=b"owners").digest()

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
            "left_out": len(counts_R) - len(units.members),
            "people": len(names),
            "in_units": int(people_U.sum()),
            "most_people": int(people_U.max()),
            "largest": int(np.diff(units.starts).max()),
            "common": [[names[one], of_each[one] / len(counts_R)] for one in common],
        }

    def spellings(self) -> np.ndarray:
        """Return a hash of each owner's name that all its spellings share: uint64 (people,)."""
        hashed = (
            unit_hash(name)[:8] if len(name) > 256 else spelling_hash(name) for name in self._people
        )
        return np.frombuffer(b"".join(hashed), "<u8")


def described(facts: Mapping[str, Any], records: int) -> list[str]:
    """Describe `Owners.facts`, a line each. NOT PRIVATE."""
    lines = [
        f"{facts['left_out']:,} of {records:,} records are left out, since one of their owners is "
        f"in another unit; {facts['in_units']:,} of {facts['people']:,} owners are in a unit, up "
        f"to {facts['most_people']:,} in one, of up to {facts['largest']:,} records"
    ]
    for name, share in facts["common"]:
        lines.append(
            f"{name!r} owns {share:.0%} of all records: if this is nobody to protect (a doctor, a "
            "mailing list), name it in data.not_owners, and fewer are left out"
        )
    return lines
