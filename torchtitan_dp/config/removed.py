"""Keys and values of earlier versions, refused in one line each."""

KEYS = {
    "data.token_cache": "removed, since token ids are cached in memory and never written to disk; "
    "omit it",
    "data.token_cache_gib": "removed, since token ids are cached in memory, in bounded room; "
    "omit it",
}
VALUES = {
    ("data.verify_records", "drawn"): "removed; omit it: all files are read and hashed once a "
    "machine ('contents'), and again only where they have changed",
    ("privacy.new_segment", "adaptive"): "removed; set it to 'planned' if the change was fixed "
    "before training, else start a run of its own from these weights "
    "(checkpoint.initial_load_path)",
}


def refuse_removed(key: str, value: object, source: str = "") -> None:
    """Refuse a removed key or value.

    Args:
        source: its file, for the message.

    Raises:
        ValueError: one line for the user.
    """
    place = f" in {source}" if source else ""
    if key in KEYS:
        raise ValueError(f"{key}{place}: {KEYS[key]}")
    if isinstance(value, str) and (key, value) in VALUES:
        raise ValueError(f"{key} = {value!r}{place}: {VALUES[key, value]}")
