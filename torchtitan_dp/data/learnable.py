"""Units that have nothing to learn: counted before a run, which is refused if all of them are such.

A unit has something to learn if one of its samples has a target. Samples are those of training
(`SampleStore`), in every format. A number of units, spread evenly over all, is counted; the others
are read only if none of these has a target, until one has.

Guarantee:
    Counts decide one thing: a run in which no training unit has a target is refused before its
    first draw. That compares "none" with "at least one" over all training units, so two neighbours
    differ in it only if a single unit has targets (docs/privacy.md assumes that this is not so).
    Which units are looked at first changes the counts alone.
    Counts, and what refusals and warnings name of the records (fields, roles, first bytes), are
    private and labelled so; nothing else follows from them.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.format import Format
from torchtitan_dp.data.records.store import RecordStore, kind_of, text_of
from torchtitan_dp.data.samples.chat_template import ASSISTANT, messages_of, unlike_messages
from torchtitan_dp.data.samples.conversations import is_answer
from torchtitan_dp.data.samples.excerpts import most_bytes
from torchtitan_dp.data.samples.samples import SampleStore

MOST_UNITS, LEAST_UNITS, MOST_TOKENS, MOST_BYTES = 1000, 4, 2**20, 2**33
"""Units that are looked at, the tokens of their samples, and the bytes read to reach them."""
MOST_RECORDS = 16
"""Records of a unit that has no target that are looked at again, to find out why."""
MOST_NAMES, MOST_CHARACTERS = 20, 60
"""Names of fields, roles or types that are kept, the first that are met, and characters of each."""


class Wanted(NamedTuple):
    """A field that a record needs."""

    key: str  # of the configuration, which names it
    field: str
    what: str  # it must hold
    is_there: Callable[[object], bool]
    hint: str | None = None  # what it is, for a refusal

    @property
    def setting(self) -> str:
        return f"{self.key} = {self.field!r}"


def wanted_fields(
    text_field: str, prompt_field: str | None, messages_field: str | None
) -> tuple[Wanted, ...]:
    """List the fields that a row needs: that of the text, answer or messages last."""

    def is_text(value: object) -> bool:
        return text_of(value) is not None

    def is_chat(value: object) -> bool:
        return messages_of(value) is not None

    if messages_field is not None:
        hint = ", a list of objects with a role and a content, two texts"
        return (Wanted("data.messages_field", messages_field, "list of messages", is_chat, hint),)
    text = Wanted("data.text_field", text_field, "text", is_text)
    if prompt_field is None:
        return (text,)
    return Wanted("data.prompt_field", prompt_field, "text", is_text), text


class Lack(NamedTuple):
    """A reason why records have no target."""

    setting: str  # that does not fit the records
    what: str  # these records are or have, in the plural
    remedy: str = ""  # empty: that of the format (`Format.explain`)
    they: str = ""  # what the names that were met are


@dataclasses.dataclass
class Census:
    """Counts of training units. PRIVATE."""

    units: int = 0  # that were looked at
    targets: int = 0  # of these, units with a target
    lacks: Counter[Lack] = dataclasses.field(default_factory=Counter)  # of units without one
    names: dict[Lack, dict[str, None]] = dataclasses.field(default_factory=dict)  # in their records
    first: dict[Lack, int] = dataclasses.field(default_factory=dict)  # record

    def meet(self, lack: Lack, record: int, names: Iterable[str]) -> None:
        """Keep what a record without a target has instead, if there is room."""
        known = self.names.setdefault(lack, {})
        self.first.setdefault(lack, record)
        for name in names:
            if len(known) <= MOST_NAMES:
                known[name[:MOST_CHARACTERS]] = None

    def described(self, lack: Lack) -> str:
        """Name what records have instead."""
        return f"{lack.they} {listed(self.names[lack])}"


def listed(names: Iterable[str]) -> str:
    """List names, in bounded space.

    >>> listed(["note", "date", "note"])
    'date, note'
    """
    several = list(dict.fromkeys(name[:MOST_CHARACTERS] for name in names))
    more = ", …" if len(several) > MOST_NAMES else ""
    return ", ".join(sorted(several[:MOST_NAMES])) + more


def looks(seq_len: int, read_bytes: int = 1) -> int:
    """Return how many units are looked at, for a few seconds of reading and tokenizing.

    Args:
        read_bytes: the store's.

    >>> looks(64), looks(8192), looks(2**20), looks(64, 2**28)
    (1000, 128, 4, 32)
    """
    return max(LEAST_UNITS, min(MOST_UNITS, MOST_TOKENS // seq_len, MOST_BYTES // read_bytes))


def check_targets(
    samples: SampleStore,
    units: np.ndarray,
    facts: Format,
    wanted: tuple[Wanted, ...],
    word: str,
    *,
    counts: bool,
) -> tuple[str, ...]:
    """Refuse units none of which has a target; describe those without one, NOT PRIVATE.

    Args:
        units: the population to train on.
        wanted: the fields of a record, in a format with fields.
        word: for a unit.
        counts: whether to count those without a target; else nothing is described, and one that
            has a target is enough.

    Raises:
        ValueError: one line; it names what the records have instead.
    """
    if not counts and _has_target(samples, units, word):
        return ()
    every, census = len(units), Census()
    number = min(looks(samples.seq_len, samples.records.read_bytes), every)
    chosen = units[np.linspace(0, every - 1, num=number, dtype=np.int64)]
    _count(samples, chosen, facts, wanted, census)
    if census.targets == 0 and not _has_target(samples, units, word):
        raise ValueError(_refusal(samples.records, facts, wanted, census, every, word))
    of = f"{census.units:,}" if census.units == every else f"{census.units:,} (of {every:,})"
    return tuple(
        f"{lack.setting}: {count:,} of {of} {word}s {lack.what} and contribute nothing"
        + (f"; {census.described(lack)}" if lack.they and census.names[lack] else "")
        for lack, count in census.lacks.most_common()
    )


def _count(
    samples: SampleStore,
    units: np.ndarray,
    facts: Format,
    wanted: tuple[Wanted, ...],
    census: Census,
) -> None:
    """Look at units, and for each without a target at why that is."""
    progress = Progress("counting what has a target", len(units), "units")
    for unit in units.tolist():
        census.units += 1
        progress.add(1)
        undecodable = 0
        for head in samples.heads(unit):
            if head.learned:
                census.targets += 1
                break
            undecodable += head.undecodable
        else:
            found: Counter[Lack] = Counter()
            for record in samples.units.records(unit)[:MOST_RECORDS].tolist():
                lack, names = _why(samples, record, facts, wanted, undecodable > 0)
                census.meet(lack, record, names)
                found[lack] += 1
            census.lacks[found.most_common(1)[0][0]] += 1
    progress.end()


def _has_target(samples: SampleStore, units: np.ndarray, word: str) -> bool:
    """Return whether some unit has a target."""
    progress, found = Progress(f"looking for a {word} with a target", len(units), f"{word}s"), False
    for unit in units.tolist():
        progress.add(1)
        if found := any(head.learned for head in samples.heads(unit)):
            break
    progress.end()
    return found


def _why(
    samples: SampleStore,
    record: int,
    facts: Format,
    wanted: tuple[Wanted, ...],
    is_undecodable: bool,
) -> tuple[Lack, Iterable[str]]:
    """Find the reason why a record has no target, and the names of what it has instead.

    Args:
        is_undecodable: whether training counts it, or another record of its unit, as such.
    """
    store, setting = samples.records, "training.dataset_path"
    value: object = None
    fields = store.fields(record) if facts.fields else None
    if not facts.fields:
        value = store.read(record, max_bytes=most_bytes(samples.seq_len))
    if fields is None and value is None:
        of_unit = " of a known unit" if samples.units.unnamed else ""
        return Lack(setting, f"are no {facts.content}s{of_unit}"), ()
    for one in wanted if fields is not None else ():
        assert fields is not None
        setting, value = one.setting, fields.get(one.field)
        if one.field not in fields:
            what, remedy = f"have no such {facts.fields}", f"name the one with the {one.what}"
            return Lack(setting, what, remedy, "their fields are"), fields
        if not one.is_there(value):
            held = kind_of(value) if one.hint is None else unlike_messages(value)
            remedy = f"name the {facts.fields} with it{one.hint or ''}"
            return Lack(setting, f"have no {one.what} there", remedy, "they hold"), (held,)
    messages = messages_of(value)
    if messages is not None and not any(is_answer(message) for message in messages):
        roles = [message.role for message in messages]
        what = f"have {'only empty turns' if ASSISTANT in roles else 'no turn'} of the role "
        remedy = "these alone are learned: rename the role of what the model is to write"
        return Lack(setting, f"{what}'{ASSISTANT}'", remedy, "their roles are"), roles
    if value == "":
        return Lack(setting, "are empty", "give records with text"), ()
    if is_undecodable:
        what = "are refused by the chat template or the tokenizer of model.hf_assets_path"
        return Lack(setting, what, "take those of the model that is trained"), ()
    what = f"have no target within training.seq_len = {samples.seq_len}"
    return Lack(setting, what, "raise it, or take longer texts"), ()


def _refusal(
    store: RecordStore,
    facts: Format,
    wanted: tuple[Wanted, ...],
    census: Census,
    every: int,
    word: str,
) -> str:
    """Describe units without a target, in one line."""
    (lack, count), *others = census.lacks.most_common()
    of = "" if census.units == every else f"of {census.units:,} that were looked at "
    also = "".join(f"; {n:,} {other.what} ({other.setting})" for other, n in others)
    remedy = lack.remedy or facts.explain(store.file_of(census.first[lack]), wanted[-1].field)
    named = f" (not private: {census.described(lack)})" if lack.they else ""
    return (
        f"{lack.setting}: none of the {every:,} {word}s has a target to learn: {of}{count:,} "
        f"{lack.what}{also}; {remedy}{named}"
    )
