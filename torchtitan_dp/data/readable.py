"""Records without usable content: refused if that is all of them, else counted in warnings.

Guarantee:
    A refusal depends only on whether any row is usable (`census`). Warnings, and names of fields
    and values in refusals, are computed from private records and labelled so.
"""

from torchtitan_dp.data.records.census import Census, Wanted
from torchtitan_dp.data.records.format import Format
from torchtitan_dp.data.records.store import RecordStore, text_of
from torchtitan_dp.data.samples.chat_template import messages_of
from torchtitan_dp.data.units import Units


def wanted_fields(
    text_field: str, prompt_field: str | None, messages_field: str | None
) -> tuple[Wanted, ...]:
    """List the fields that a row needs: that of the text, answer or messages last."""

    def is_text(value: object) -> bool:
        return text_of(value) is not None

    def is_chat(value: object) -> bool:
        return messages_of(value) is not None

    if messages_field is not None:
        return (Wanted("data.messages_field", messages_field, "list of messages", is_chat),)
    text = Wanted("data.text_field", text_field, "text", is_text)
    if prompt_field is None:
        return (text,)
    return Wanted("data.prompt_field", prompt_field, "text", is_text), text


def refuse_unreadable(
    store: RecordStore, facts: Format, wanted: tuple[Wanted, ...], census: Census
) -> None:
    """Refuse a data set in which no row has a wanted field.

    Raises:
        ValueError: one line; it names the files' true format, if that is another one.
    """
    if census.undecodable == census.lines:
        raise ValueError(_without_fields(store, facts, wanted))
    for one, lacking in zip(wanted, census.without, strict=True):
        if lacking + census.undecodable == census.lines:
            raise ValueError(
                f"{one.key} = {one.field!r}: none of the {census.lines} {facts.row}s has a "
                f"{one.what} there; name the field that holds it (not private: {census.fields})"
            )


def refuse_unnamed(
    store: RecordStore,
    facts: Format,
    units: Units,
    unit_field: str | None,
    wanted: tuple[Wanted, ...],
    census: Census | None,
) -> None:
    """Refuse a data set in which no record names its unit.

    Args:
        census: of a format with fields.

    Raises:
        ValueError: one line.
    """
    if unit_field is None or units.unnamed < len(store):
        return
    none = f"data.unit_field = {unit_field!r}: none of the {len(store)} records has one"
    if census is None:
        raise ValueError(
            f"{none}: every file lies in no folder below training.dataset_path; give a path above "
            "the units' folders"
        )
    if census.undecodable == census.lines:
        raise ValueError(_without_fields(store, facts, wanted))
    if census.pointed:
        raise ValueError(
            f"data.unit_field = {unit_field!r}: it holds {census.example}, a number with a point, "
            f"in {census.pointed} of {census.lines} {facts.row}s, and a usable unit in none; write "
            "whole numbers or strings (the number is not private)"
        )
    raise ValueError(
        f"{none}: name the {facts.fields} that holds the unit, a string or a whole number (not "
        f"private: {census.fields})"
    )


def _without_fields(store: RecordStore, facts: Format, wanted: tuple[Wanted, ...]) -> str:
    """Describe files without fields in any row."""
    assert facts.explain is not None, "only rows with fields are counted"
    found = facts.explain(store.file_of(0), wanted[-1].field, len(store))
    return f"training.dataset_path: {found}"


def warnings(
    store: RecordStore,
    facts: Format,
    units: Units,
    unit_field: str | None,
    wanted: tuple[Wanted, ...],
    census: Census | None,
    trained: int,
) -> tuple[str, ...]:
    """Describe the records without usable content. NOT PRIVATE: for `console.warn` alone.

    Args:
        trained: the number of units to train on.
        census: of a format with fields.
    """
    found = [] if census is None else _of_rows(facts, wanted, census, len(store))
    if units.unnamed:
        what = f"{units.unnamed} of {len(store)} {facts.row}s"
        lack = f"have no data.unit_field = {unit_field!r}"
        if not facts.fields:
            lack = "lie in no folder below training.dataset_path (data.unit_field = 'folder')"
        elif census is not None and census.pointed:
            lack += f" ({census.pointed} hold a number with a point, as {census.example})"
        found.append(
            f"{what} {lack}: each is a unit of its own that contributes nothing, and counts in "
            f"the number of units, so that q and the delta check are against {trained} units"
        )
    return tuple(found)


def _of_rows(facts: Format, wanted: tuple[Wanted, ...], census: Census, rows: int) -> list[str]:
    """Count the rows without a text."""
    first = "the first " if census.lines < rows else ""
    of = f"of {first}{census.lines} {facts.row}s"
    found = [
        f"{lacking} {of} have no {one.what} in {one.key} = {one.field!r} and contribute nothing; "
        f"{census.fields}"
        for one, lacking in zip(wanted, census.without, strict=True)
        if lacking
    ]
    if census.undecodable:
        found.append(f"{census.undecodable} {of} are no {facts.content}s and contribute nothing")
    if census.empty:
        last = wanted[-1]
        found.append(
            f"{census.empty} {of} are empty in {last.key} = {last.field!r} and contribute nothing"
        )
    return found
