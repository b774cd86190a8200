"""Samples of small units, draws of them, and tokenizers whose ids are easy to read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.data.stores import records_of, store_of
from torchtitan_dp.data.batching import Draw, Microbatch, RecordLoader
from torchtitan_dp.data.dataset import IGNORE_INDEX, Samples
from torchtitan_dp.data.tokenizer import ByteTokenizer, Tokenizer
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import Choices, choices, poisson_draw

BOS, EOS, IGNORED = 256, 257, IGNORE_INDEX
T = 16
ONE, WINDOW = {"one_record": True}, {"window": True}
HOW: tuple[dict[str, Any], ...] = ({}, ONE, WINDOW, {**ONE, **WINDOW})
UNITS: dict[str, Sequence[str | None]] = {
    f"user {u}": [chr(48 + u) * (1 + (7 * u + 3 * i) % 25) for i in range(1 + u % 5)]
    for u in range(20)
}
UNITS["nobody"] = [None, None]


class Words(ByteTokenizer):
    """A word is a token, its number of letters; no marks. A blank line is 0."""

    bos_id = eos_id = None
    identity = "words"

    def encode(self, text: str) -> np.ndarray:
        pause = [0] if text == "\n\n" else []
        return np.array(pause + [len(word) for word in text.split()], dtype=np.int64)

    def get_vocab_size(self) -> int:
        return 2**20


def samples_of(
    root: Path,
    units: Mapping[str, Sequence[str | None]],
    seq_len: int = T,
    *,
    tokenizer: Tokenizer | None = None,
    **how: bool,
) -> tuple[Samples, list[int]]:
    """Samples of units whose records, None without a text, alternate in a file; units as given."""
    rows = sorted((i, name, text) for name, texts in units.items() for i, text in enumerate(texts))
    lines = [{"who": name, "text": text} for _, name, text in rows]
    store = store_of(lines, root, unit_field="who", tokenizer=tokenizer)
    names = [rows[of[0]][1] for of in records_of(store.units)]
    return Samples(store, seq_len, **how), [names.index(name) for name in units]


def sample(
    samples: Samples, unit: int, length: int | None = None, *of: Any, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make `(tokens_T, labels_T)` of one sample (`Samples.ids`), as `Samples.batch` does."""
    both = np.empty((2, length or samples.seq_len), dtype=np.int64)
    samples.lay_out(samples.ids(unit, *of, **how), *both)
    tokens_T, labels_T = torch.from_numpy(both)
    return tokens_T, labels_T


def rng(seed: int = 0) -> Choices:
    """Return the generator of a draw."""
    return choices(bytes(32), seed)


def marked(*texts: str) -> list[int]:
    """Return the ids of records of bytes."""
    return [one for text in texts for one in (BOS, *text.encode(), EOS)]


def ids(sample: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Read the ids of a sample, all of which are targets, and check the shift of its labels."""
    tokens_T, labels_T = sample
    count = int((labels_T != IGNORED).sum())
    assert (labels_T[count:] == IGNORED).all()
    assert tokens_T[1:count].tolist() == labels_T[: max(count - 1, 0)].tolist()
    return [*tokens_T[:1].tolist(), *labels_T[:count].tolist()] if count else []


def loader(samples: Samples, ranks: int = 1, rank: int = 0, **terms: Any) -> RecordLoader:
    """Make a loader of all units, whose positions are not their numbers."""
    units = np.arange(len(samples.units))[::-1].copy()
    return RecordLoader(samples, units, ranks=ranks, rank=rank, **{"batch_size": 1, **terms})


def dealt(
    loader: RecordLoader, draw: Draw, ladder: tuple[int, ...] | None = None
) -> list[Microbatch]:
    """Make a rank's share of a draw, padded to the whole length without a ladder."""
    every = loader.deal(draw, ladder or (loader.samples.seq_len,))
    return [loader.microbatch(one, draw.key) for one in every]


def draws(count: int, rates: Sequence[float] = (0.5, 0.0, 1.0, 0.05, 0.5)) -> list[Draw]:
    """Draw steps from `count` units, one of which is empty."""
    root = RootKey.from_debug_seed(3)
    sampling, window = root.stream("sampling"), root.stream("window")
    return [
        Draw(poisson_draw(sampling.take(step), count, rate), window.take(step))
        for step, rate in enumerate(rates)
    ]


def same(found: Sequence[Microbatch], wanted: Sequence[Microbatch]) -> bool:
    """Compare microbatches bit by bit."""
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one, other, strict=True)
    )
