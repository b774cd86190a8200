"""What the stores of all formats have in common: decoding a part of a text, and the fingerprint."""

import codecs
import hashlib

from torchtitan_dp.data.files import Files

_CONTINUATIONS = bytes(range(0x80, 0xC0))  # of a character's first byte


def checked(index: int, count: int) -> int:
    """Return a record's index if it is one of `count`, and raise IndexError if not."""
    if not 0 <= index < count:
        raise IndexError(f"record {index} of {count}")
    return index


def decode(data: bytes, max_bytes: int | None, start: int, codec: str = "utf-8-sig") -> str:
    """Decode the UTF-8 text of the first `max_bytes`, dropping a character that a cut splits."""
    is_cut = max_bytes is not None and len(data) > max_bytes
    data = data[:max_bytes]
    if start > 0:  # no byte order mark here, but perhaps the end of a character
        codec, data = "utf-8", data[:3].lstrip(_CONTINUATIONS) + data[3:]
    return codecs.getincrementaldecoder(codec)().decode(data, final=not is_cut)


def fingerprint(format: str, files: Files, records: str, contents: str) -> str:
    """Hash a data set, wherever it lies: SHA-256, hex. PRIVATE.

    Args:
        records: which records there are, by their places.
        contents: the hash of what they hold; empty if it was not made.
    """
    text = f"{format}\0{files.listing_hash}\0{records}\0{contents}"
    return hashlib.sha256(text.encode()).hexdigest()
