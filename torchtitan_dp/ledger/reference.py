"""The reference of `privacy.json`, from `schema`, as Markdown."""

from torchtitan_dp.config.reference import cell
from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.json_types import in_words


def privacy_reference() -> str:
    """Return the table of the keys of `privacy.json`."""
    rows = ["| key | type | in a release | meaning |", "| --- " * 4 + "|"]
    for key in schema.KEYS:
        is_only = key.origin is schema.Origin.RELEASE
        where = "only there" if is_only else "yes" if key.released else "no"
        kind = in_words(key.type)
        rows.append(f"| `{key.name}` | {kind} | {where} | {cell(key.meaning)} |")
    return "\n".join(rows)
