"""The data of a run: its store of tokens, units, their split into training and held-out ones, and
the samples that training takes of them.

A sample begins where its unit's records begin, one after the other, or is a random window of them.
Of a record with answers that is longer, it begins a quarter of a sample before the first target, or
earlier if the record ends within it.

Guarantee:
    A run in which no training unit has a target is refused before its first draw. Two neighbours
    differ in that only if a single unit has targets (docs/privacy.md assumes that this is not so).
    Counts of records, and what refusals and warnings name of them (fields, roles, types), are
    private and labelled so; nothing else follows from them.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_dp.data.files import Files
from torchtitan_dp.data.owners import described
from torchtitan_dp.data.prepare import Source
from torchtitan_dp.data.reading import Lack
from torchtitan_dp.data.store import Store, Units, split
from torchtitan_dp.privacy.sampling import Choices

TOKENS_BY = "model.hf_assets_path (tokenizer, chat template)"  # in `Records.settings`
_QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)
_WORDS = {"0": "least", "50": "median", "100": "most"}


IGNORE_INDEX = -100  # the default of F.cross_entropy
PROMPT_SHARE = 4  # a cut prompt keeps one part in so many of the window, or what the answer leaves
NOTHING = np.empty(0, dtype=np.int64)
_FEW = 10  # held-out units


@dataclass(eq=False)
class Samples:
    """Samples of `seq_len` tokens from the units of a store."""

    store: Store
    seq_len: int
    _: KW_ONLY
    one_record: bool = False  # whether a sample is of one of a unit's records, each equally likely
    window: bool = False  # whether one of a longer text is a random window; else its beginning
    has_answers: bool = False  # whether only answers are targets (`reading`)
    pad_id: int = 0  # the token of padding

    def __post_init__(self) -> None:
        assert not (self.window and self.has_answers)
        self.units, self.is_random = self.store.units, self.one_record or self.window
        self._between, limit = self.store.between, self.seq_len + 1
        # By place (`Units.places`): where the ids that samples take of a record begin in it, and
        # where they end, if those of all records lie in a row.
        lengths = self.store.lengths()[self.units.members]
        self._cuts = np.zeros_like(lengths)
        if self.has_answers:
            # At least one id before the target: the first of a sample is never predicted.
            begins = self.store.firsts[self.units.members] - max(limit // PROMPT_SHARE, 1)
            self._cuts = np.minimum(begins, lengths - self._between - limit).clip(min=0)
            lengths = np.minimum(lengths, limit + self._between)
        self._ends = np.concatenate([[0], np.cumsum(lengths)])

    def has_target(self, units: np.ndarray) -> np.ndarray:
        """Return which units have a target: bool, like `units`. Nothing predicts the first id."""
        starts, ends, begins = self.units.starts, self._ends[1:], self._ends[:-1]
        first = begins if self.one_record else np.repeat(begins[starts[:-1]], np.diff(starts))
        # Indices in the ids of a sample: of each record's last id, or of its first target.
        indices = ends - 1 - first - self._between
        if self.has_answers:
            targets = self.store.firsts[self.units.members] - self._cuts
            indices = np.where(ends > begins, begins - first + targets, 0)
            indices[indices > self.seq_len] = 0
        return np.logical_or.reduceat(indices > 0, starts[:-1])[units]

    def tokens(self, unit: int, rng: Choices | None = None, windows: int = 1) -> int:
        """Count the tokens of the longest of a unit's samples (`ids`), without padding."""
        found = max(self._length(places) for places in self._chosen(unit, rng, windows))
        return max(min(found, self.seq_len + 1) - 1, 0)

    def ids(
        self, unit: int, rng: Choices | None = None, window: int = 0, windows: int = 1
    ) -> np.ndarray:
        """Read the ids of one sample, int64, at most seq_len + 1; those that are no targets as
        their complement. Raises OSError if the disk failed.

        Unit -1 is padding, without ids. `rng`, a fresh generator of this unit and draw, is needed
        if `is_random`. The `windows` of a long text begin in as many equal parts of it; a text that
        fits one sample, or too few records, leave later windows without ids.
        """
        if unit == -1:
            return NOTHING
        chosen, limit = self._chosen(unit, rng, windows), self.seq_len + 1
        if self.one_record and window >= len(chosen):
            return NOTHING
        places = chosen[window if self.one_record else 0]
        length = self._length(places)
        if not self.window or length < limit:
            return self._read(places, 0) if self.one_record or window == 0 else NOTHING
        assert rng is not None
        share = float(rng.random(windows)[window])
        if not self.one_record:
            share = (window + share) / windows
        # From a window before the first id to the last, and then moved inside: ids near both ends
        # are taken up to twice as often as others, none never.
        start = int(share * (length + limit)) - limit
        return self._read(places, min(max(start, 0), length - limit))

    def _chosen(self, unit: int, rng: Choices | None, windows: int) -> list[range]:
        places = self.units.places(unit)
        if not self.one_record:
            return [places]
        assert rng is not None
        if windows == 1:
            found = [int(rng.integers(len(places)))]
        else:
            found = rng.choice(len(places), size=min(windows, len(places)), replace=False).tolist()
        return [places[i : i + 1] for i in found]

    def _length(self, places: range) -> int:
        return max(int(self._ends[places.stop] - self._ends[places.start]) - self._between, 0)

    def _read(self, places: range, start: int) -> np.ndarray:
        """Read the ids of records, from `start` on, as many as a sample has at most."""
        at = int(self._ends[places.start]) + self._between + start
        place = int(np.searchsorted(self._ends, at, side="right")) - 1
        found, skip, needed = [NOTHING], at - int(self._ends[place]), self.seq_len + 1
        while needed > 0 and place < places.stop:
            ids = self._record(place, skip, needed)
            found.append(ids)
            needed, place, skip = needed - len(ids), place + 1, 0
        return np.concatenate(found)

    def _record(self, place: int, skip: int, most: int) -> np.ndarray:
        """Read what a sample may take of a record, and what stands before it."""
        record, cut = int(self.units.members[place]), int(self._cuts[place])
        if cut == 0:
            return self.store.ids(record, skip, most)
        between = self.store.ids(record, skip, self._between - skip)
        start = cut + max(skip, self._between)
        return np.concatenate([between, self.store.ids(record, start, most - len(between))])

    def lay_out(self, ids: np.ndarray, tokens_T: np.ndarray, labels_T: np.ndarray) -> None:
        """Write a sample of these ids: tokens, and shifted labels where these are targets."""
        ids = ids[: len(tokens_T) + 1]
        count = max(len(ids) - 1, 0)
        tokens_T[:count], tokens_T[count:] = np.where(ids < 0, ~ids, ids)[:-1], self.pad_id
        labels_T[:count], labels_T[count:] = ids[1:], IGNORE_INDEX
        labels_T[:count][ids[1:] < 0] = IGNORE_INDEX

    def batch(
        self,
        units: Sequence[int] | np.ndarray,
        length: int | None = None,
        rngs: Sequence[Choices | None] | None = None,
        windows: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Make `(tokens_BT, labels_BT)`, int64 (len(units), seq_len or `length`): `windows` samples
        of each unit, which `units` repeats as often in a row. Labels are padded with
        `IGNORE_INDEX`: a unit without ids (empty, undecodable, or -1) contributes exactly 0."""
        both = np.empty((2, len(units), length or self.seq_len), dtype=np.int64)
        for row, (unit, rng) in enumerate(zip(units, rngs or [None] * len(units), strict=True)):
            self.lay_out(self.ids(int(unit), rng, row % windows, windows), *both[:, row])
        tokens_BT, labels_BT = torch.from_numpy(both)
        return tokens_BT, labels_BT


@dataclass(frozen=True)
class Records:
    source: Source
    store: Store
    train: np.ndarray
    heldout: np.ndarray
    fingerprint: str  # of the records and their split; private
    settings: Mapping[str, object]  # by key: samples depend on them
    warnings: tuple[str, ...]  # about records that contribute nothing; private

    @classmethod
    def of(
        cls,
        source: Source,
        files: Files,
        store: Store,
        *,
        heldout_fraction: float = 0.0,
        needs_heldout: bool = False,  # none held out is an error; a warning if number_is_secret
        number_is_secret: bool = False,  # neighbours differ in it: a public privacy.sample_rate
    ) -> "Records":
        """Return the records of a source's store, with some units held out, by a hash of their
        names. Raises ValueError, one line, also if none is left."""
        train, heldout = split(store.units.hashes, heldout_fraction)
        facts, warnings = source.facts, [*source.notices(files)]
        alike, people = store.facts["alike"]
        if alike:
            warnings.append(
                f"{alike:,} units may be {people:,}: names differ only by case, blanks, Unicode "
                f"form, or zeros; write data.unit_field = {source.unit_field!r} in one way"
            )
        if source.unit_field is not None and len(store.units) == len(store) > 1:
            warnings.append(
                f"every {facts.row} is a unit of its own: check that data.unit_field = "
                f"{source.unit_field!r} names what is to be protected"
            )
        if owners := store.facts.get("owners"):
            warnings += described(owners, len(store))
        if unnamed := store.facts["unnamed"]:
            warnings.append(
                f"{unnamed} of {len(store)} {facts.row}s have no usable data.unit_field = "
                f"{source.unit_field!r}: each counts as a unit that contributes nothing, so q and "
                f"the delta check are against {len(train)} units"
            )
        if needs_heldout and 0 < len(heldout) < _FEW:
            warnings.append(
                f"a loss of {len(heldout)} held-out {source.unit_word}s says little: raise "
                f"data.heldout_fraction ({heldout_fraction})"
            )
        if needs_heldout and len(heldout) == 0:
            none = (
                f"data.heldout_fraction = {heldout_fraction}: holds out none of "
                f"{len(store.units)} {source.unit_word}s, but validation.enable = true"
            )
            if not number_is_secret:
                cure = "have more units" if heldout_fraction >= 0.2 else "raise it"
                raise ValueError(f"{none}; {cure}, or set validation.enable = false")
            # A refusal would show whether a unit that is held out is there.
            warnings.append(f"{none}, so held-out losses are nan; raise it")
        settings = settings_of(source, heldout_fraction)
        named = hashlib.sha256(store.units.hashes.tobytes()).hexdigest()
        # Runs with different tokenizers are on the same records.
        of_records = sorted(item for item in settings.items() if item[0] != TOKENS_BY)
        terms = source.format, store.contents, named, of_records
        fingerprint = hashlib.sha256(repr(terms).encode()).hexdigest()
        return cls(source, store, train, heldout, fingerprint, settings, tuple(warnings))

    @classmethod
    def empty(cls, source: Source, count: int, heldout_fraction: float) -> "Records":
        """Return the number of units, and no records, for a plan before there are any: `train` and
        `heldout` have lengths alone, in no memory."""
        held = math.ceil(heldout_fraction * count)
        if held == count:
            split(np.zeros(1, dtype=np.uint64), heldout_fraction)  # refuses it
        nothing, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
        units = Units(nothing, one, nothing.astype(np.uint64))
        store = Store("", nothing, nothing, nothing, units, {"lacks": []})
        train, heldout = (np.broadcast_to(one, number) for number in (count - held, held))
        return cls(source, store, train, heldout, "", {}, ())

    def check_targets(self, samples: Samples) -> tuple[str, ...]:
        """Describe units whose samples have no target, NOT PRIVATE; ValueError if no unit has."""
        has_target, name = samples.has_target(self.train), self.source.unit_word
        lacks = self._lacks(self.train[~has_target])
        if not has_target.any():
            none = f"none of the {len(self.train):,} {name}s has a target to learn"
            if lacks:
                self.source.refuse_lacks(lacks, none, "" if name == "record" else "records ")
            raise ValueError(f"training.seq_len = {samples.seq_len}: {none} within it; raise it")
        if has_target.all():
            return ()
        each = "; ".join(f"{one.number:,} {one.what} ({one.setting})" for one in lacks)
        why = f" (records: {each})" if lacks else ""
        some = f"{int((~has_target).sum()):,} of {len(self.train):,} {name}s"
        return (f"{some} have no target and contribute nothing{why}",)

    def figures(self, samples: Samples) -> dict[str, Any]:
        """Count units and tokens, and what samples have of them. PRIVATE."""
        units = self.store.units
        record_P = np.maximum(self.store.lengths()[units.members] - self.store.between, 0)
        tokens_N, drawn = _of_units(record_P, units)[self.train], record_P[self._places(self.train)]
        drawn = drawn if samples.one_record else tokens_N  # what a draw takes of a unit
        records_N, total = np.diff(units.starts)[self.train], max(int(tokens_N.sum()), 1)
        heads_N = _of_units(np.minimum(record_P, samples.seq_len), units)[self.train]
        reached_N = heads_N if samples.one_record else np.minimum(tokens_N, samples.seq_len)
        sample_N = heads_N / records_N if samples.one_record else reached_N
        return {
            "not_private": True,
            "records": len(self.store),
            "units": len(units),
            "train_units": len(self.train),
            "heldout_units": len(self.heldout),
            "undecodable_records": self.undecodable(),
            "empty_units": int((~samples.has_target(self.train)).sum()),
            "tokens": int(tokens_N.sum()),
            "one_record": samples.one_record,
            "tokens_quantiles": {str(q): int(np.percentile(drawn, q)) for q in _QUANTILES},
            "seq_len": samples.seq_len,
            "longer": float((drawn > samples.seq_len).mean()),
            "tokens_per_sample": float(sample_N.mean()),
            "share_in_one_sample": float(sample_N.sum() / total),
            "share_in_reach": 1.0 if samples.window else float(reached_N.sum() / total),
        }

    def undecodable(self) -> int:
        """Count the records to train on that cannot be decoded. PRIVATE."""
        return sum(lack.number for lack in self._lacks(self.train) if lack.is_undecodable)

    def _lacks(self, units: np.ndarray) -> list[Lack]:
        """Count why these units' records have no ids, the most frequent first; names are of all."""
        records = self.store.units.members[self._places(units)]
        counts = np.bincount(self.store.reasons[records], minlength=256).tolist()
        found = zip(self.store.facts["lacks"], counts[1:], strict=False)
        lacks = [Lack(**{**fact, "number": count}) for fact, count in found if count]
        return sorted(lacks, key=lambda lack: -lack.number)

    def _places(self, units: np.ndarray) -> np.ndarray:
        """Return which places have a record of these units: bool (records,)."""
        starts = self.store.units.starts
        is_chosen = np.zeros(len(starts) - 1, dtype=bool)
        is_chosen[units] = True
        return np.repeat(is_chosen, np.diff(starts))


def settings_of(source: Source, heldout_fraction: float) -> dict[str, object]:
    """Return the settings on which samples depend, by their keys: a resume must have them alike."""
    tokens_by = source.terms["tokenizer"], source.terms["template"]
    return {
        "data.unit_field": source.unit_field,
        "data.not_owners": sorted(source.not_owners),
        "data.heldout_fraction": heldout_fraction,
        **dict.fromkeys(("data.text_field", "data.prompt_field", "data.messages_field")),
        **{key: field for field, key in source.reading.keys.items()},
        TOKENS_BY: f"sha256 {hashlib.sha256(repr(tokens_by).encode()).hexdigest()[:12]}",
    }


def _of_units(values_P: np.ndarray, units: Units) -> np.ndarray:
    return np.asarray(np.add.reduceat(values_P, units.starts[:-1]))


def describe(figures: Mapping[str, Any], word: str) -> list[str]:
    """Describe `Records.figures`, a line each. NOT PRIVATE."""
    grouped = "" if word == "record" else f" in {figures['units']:,} {word}s"
    drawn = "record" if figures["one_record"] else word
    draw = f" (a draw of a {word} takes one)" if drawn != word else ""
    quantiles = figures["tokens_quantiles"].items()
    each = ", ".join(f"{_WORDS.get(q, f'{q}%')} {value:,}" for q, value in quantiles)
    return [
        f"{figures['records']:,} records{grouped}: {figures['train_units']:,} to train on, "
        f"{figures['heldout_units']:,} held out; {figures['tokens']:,} tokens to train on; "
        f"{figures['empty_units']:,} {word}s have no target, "
        f"{figures['undecodable_records']:,} records cannot be decoded",
        f"tokens per {drawn}{draw}: {each}",
        f"at training.seq_len = {figures['seq_len']:,}: {figures['longer']:.0%} of {drawn}s are "
        f"longer, and are cut; a sample averages {figures['tokens_per_sample']:,.0f} tokens; one "
        f"draw of each covers {figures['share_in_one_sample']:.0%} of all tokens, many draws up to "
        f"{figures['share_in_reach']:.0%}",
    ]
