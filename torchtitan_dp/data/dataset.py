"""The data of a run: its store of tokens, units, and their split into training and held-out ones.

Guarantee:
    A run in which no training unit has a target is refused before its first draw. Two neighbours
    differ in that only if a single unit has targets (docs/privacy.md assumes that this is not so).
    Counts of records, and what refusals and warnings name of them (fields, roles, types), are
    private and labelled so; nothing else follows from them.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_dp.data.batching import Samples
from torchtitan_dp.data.files import Files
from torchtitan_dp.data.prepare import Source
from torchtitan_dp.data.reading import Lack
from torchtitan_dp.data.store import Store, Units, split
from torchtitan_dp.privacy.settings import unit_word

TOKENS_BY = "model.hf_assets_path (tokenizer, chat template)"  # in `Records.settings`
_QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)
_WORDS = {"0": "least", "50": "median", "100": "most"}


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
        if pointers := store.facts["pointers"]:
            warnings.append(
                f"{pointers:,} of {len(files.names):,} files of training.dataset_path are Git LFS "
                "pointers, read as they are; fetch the files: git lfs pull"
            )
        alike, people = store.facts["alike"]
        if alike:
            warnings.append(
                f"{alike:,} units may be {people:,}: names differ only by case, blanks, Unicode "
                f"form, or zeros; write data.unit_field = {source.unit_field!r} in one way"
            )
        if unnamed := store.facts["unnamed"]:
            warnings.append(
                f"{unnamed} of {len(store)} {facts.row}s have no usable data.unit_field = "
                f"{source.unit_field!r}: each counts as a unit that contributes nothing, so q and "
                f"the delta check are against {len(train)} units"
            )
        if needs_heldout and len(heldout) == 0:
            none = (
                f"data.heldout_fraction = {heldout_fraction}: holds out none of "
                f"{len(store.units)} {unit_word(source.unit_field)}s, but validation.enable = true"
            )
            if not number_is_secret:
                raise ValueError(f"{none}; raise it")
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
        has_target, name = samples.has_target(self.train), unit_word(self.source.unit_field)
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
        """Count units and tokens, and what samples of several lengths have of them. PRIVATE."""
        units = self.store.units
        record_P = np.maximum(self.store.lengths()[units.members] - self.store.between, 0)
        tokens_N, drawn = _of_units(record_P, units)[self.train], record_P[self._places(self.train)]
        drawn = drawn if samples.one_record else tokens_N  # what a draw takes of a unit
        records_N, total = np.diff(units.starts)[self.train], max(int(tokens_N.sum()), 1)
        by_length = []
        for power in range(-4, 5):
            length = max(int(samples.seq_len * 2.0**power), 1)
            heads_N = _of_units(np.minimum(record_P, length), units)[self.train]
            reached_N = heads_N if samples.one_record else np.minimum(tokens_N, length)
            sample_N = heads_N / records_N if samples.one_record else reached_N
            row = {"seq_len": length, "longer": float((drawn > length).mean())}
            row |= {"share_in_one_sample": float(sample_N.sum() / total)}
            row |= {"share_in_reach": 1.0 if samples.window else float(reached_N.sum() / total)}
            by_length.append({**row, "tokens_per_sample": float(sample_N.mean())})
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
            "by_length": by_length,
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
    lines = [
        f"{figures['records']:,} records{grouped}: {figures['train_units']:,} to train on, "
        f"{figures['heldout_units']:,} held out; {figures['tokens']:,} tokens to train on; "
        f"{figures['empty_units']:,} {word}s have no target, "
        f"{figures['undecodable_records']:,} records cannot be decoded",
        f"tokens per {drawn}{draw}: {each}",
    ]
    seq_len = figures["seq_len"]
    for row in figures["by_length"]:
        length = row["seq_len"]
        if length in (max(seq_len // 2, 1), seq_len, 2 * seq_len):
            lines.append(
                f"at {'training.seq_len = ' if length == seq_len else ''}{length:,}: "
                f"{row['longer']:.0%} of {drawn}s are longer, and are cut; a sample averages "
                f"{row['tokens_per_sample']:,.0f} tokens; one pass trains on "
                f"{row['share_in_one_sample']:.0%} of all tokens, all draws can reach "
                f"{row['share_in_reach']:.0%}"
            )
    return lines
