"""How long a sample's text may take here: measured on made-up text, so that no record is read.

Tokenizers read some texts much slower than others (one long word, marks upon marks), and the other
ranks wait meanwhile in a collective, whose time-out ends the run.
"""

import json
import math
import random
import string
import time
from collections.abc import Iterator

from torchtitan_dp.data.tokenizer import Tokenizer

_PIECE = 2**13  # bytes, about
_PARSED_PIECE = 2**18  # bytes
_ROUNDS = 3  # of which the quickest counts: others may be using the machine


def slowest_seconds(tokenizer: Tokenizer, size: int) -> float:
    """Estimate how long `size` bytes of the slowest text known take, from small pieces.

    Byte-pair encoding of one word of n bytes is a matter of n log n.
    """
    slowest = 0.0
    for pieces in zip(*(_texts(seed) for seed in range(_ROUNDS)), strict=True):
        slowest = max(slowest, min(_seconds_per_byte(tokenizer, piece) for piece in pieces))
    return slowest * size * max(math.log2(max(size, 2)) / math.log2(_PIECE), 1.0)


def slowest_parse_seconds(size: int) -> float:
    """Estimate how long `size` bytes of the slowest JSON known take to be parsed."""
    if size == 0:
        return 0.0
    line = "[" + "[]," * (_PARSED_PIECE // 3) + "0]"

    def seconds() -> float:
        begun = time.perf_counter()
        json.loads(line)
        return time.perf_counter() - begun

    return min(seconds() for _ in range(_ROUNDS)) * size / len(line)


def _seconds_per_byte(tokenizer: Tokenizer, text: str) -> float:
    begun = time.perf_counter()
    tokenizer.encode(text)
    return (time.perf_counter() - begun) / len(text.encode())


def _texts(seed: int) -> Iterator[str]:
    """Make texts that are slow for one tokenizer or another, and different for each seed, since
    words that were seen are remembered.
    """
    rng = random.Random(seed)
    yield "".join(rng.choices(string.ascii_lowercase, k=_PIECE))  # one word
    yield "".join(rng.choices(string.ascii_letters + string.digits + "+/", k=_PIECE))  # base64
    yield "".join(rng.choices(string.digits, k=_PIECE))
    yield " " * (_PIECE + seed)
    yield "\ufdfa" * (_PIECE // 3 + seed)  # one character, 18 after compatibility decomposition
    marks = [chr(code) for code in range(0x300, 0x340)]
    yield "".join(
        rng.choice(string.ascii_lowercase) + rng.choice(marks) for _ in range(_PIECE // 3)
    )
