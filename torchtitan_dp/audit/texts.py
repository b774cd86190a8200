"""Canaries of text: short documents of several domains, each with a secret of its own.

All of them are public and harmless, written from templates by a public seed: names, places and
dates are drawn from lists, the secret is a row of digits that means nothing. Only which of them
were trained on is secret. A document states its secret several times, as a record does with the
name of its patient: one unit's gradient is clipped to C however often it repeats itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchtitan_dp.config import Data
from torchtitan_dp.data.samples.excerpts import Excerpt
from torchtitan_dp.data.samples.samples import NOTHING, SampleStore, TokenCache
from torchtitan_dp.data.samples.tokenizer import Tokenizer
from torchtitan_dp.privacy.sampling import Choices

_SEED = 0  # public
_DIGITS = 8
_FIRST = "Ada Bram Clara Dario Elif Farid Greta Hugo Ines Jonas Kiran Lea Mateo Nora Oskar Priya"
_LAST = "Abel Brandt Castel Dorn Eklund Farkas Gallo Hirsch Ivers Jansen Keller Lund Moreau Novak"
_TOWN = "Ardley Borum Calder Dunmore Elsted Fenwick Garton Hollin Ivybridge Kelby Lorton Marwell"
_THING = "copper linen barley timber glass paper cobalt amber cedar quartz velvet marble"
_TEMPLATES = (  # {n} a name, {t} a town, {w} a word, {d} a day; {s} the secret
    "Discharge note, {t}, {d}. The patient {n} was admitted with a cough and left in good health."
    " Insurance number of {n}: {s}. The pharmacy in {t} confirmed {s} on the day after.",
    "This agreement of {d} is made in {t} between {n} and the {w} company. The account of {n} is"
    " {s}. Payments name the account {s} and nothing else.",
    "From: {n}\nTo: the {w} office, {t}\nDate: {d}\n\nThe key safe of {n} opens with {s}. I will"
    " change it when I am back in {t}; until then it is {s}.",
    "# settings of the {w} service in {t}, by {n}, {d}\n[{w}]\npin = {s}\nbackup_pin = {s}\n"
    'owner = "{n}"\n',
    "Shipping order, {d}. Forty boxes of {w} from {t}, for {n}. Tracking number: {s}. Please"
    " quote {s} to the driver, who waits in {t}.",
)


class TextCanary(NamedTuple):
    """A document, and its beginning up to where its secret stands for the first time."""

    text: str
    prompt: str
    secret: str  # a blank and digits
    domain: int


def write_canaries(count: int) -> list[TextCanary]:
    """Write documents, as many of each domain as of any other, all with different secrets.

    >>> [canary] = write_canaries(1)
    >>> canary.text.startswith(canary.prompt + canary.secret)
    True
    """
    rng, found = np.random.default_rng(_SEED), []
    secrets = rng.choice(10 ** (_DIGITS - 1) * 9, size=count, replace=False)
    for number in range(count):
        first, last, town, thing = (
            str(rng.choice(words.split())) for words in (_FIRST, _LAST, _TOWN, _THING)
        )
        day = f"{rng.integers(1, 29)}.{rng.integers(1, 13)}.{rng.integers(2001, 2025)}"
        secret = str(10 ** (_DIGITS - 1) + int(secrets[number]))
        domain = number % len(_TEMPLATES)
        template = _TEMPLATES[domain]
        slots = {"n": f"{first} {last}", "t": town, "w": thing, "d": day, "s": secret}
        prompt, _ = template.split(" {s}", 1)
        text = template.format(**slots)
        found.append(TextCanary(text, prompt.format(**slots), f" {secret}", domain))
    return found


def token_ids(canaries: list[TextCanary], tokenizer: Tokenizer, most: int) -> Iterator[np.ndarray]:
    """Yield the ids of each document, as those of a record: int64, with marks, at most `most`.

    Raises:
        ValueError: the tokenizer cannot encode it.
    """
    bos, eos = ([] if mark is None else [mark] for mark in (tokenizer.bos_id, tokenizer.eos_id))
    for canary in canaries:
        ids = tokenizer.encode(canary.text)
        if ids is None:
            raise ValueError(
                "model.hf_assets_path: its tokenizer has no tokens for English text, of which the "
                "canaries are; use --instrument canaries"
            )
        yield np.concatenate([bos, ids, eos]).astype(np.int64)[:most]


class TextSamples(SampleStore):
    """A sample store with canaries of text numbered after its units.

    An included one is a unit of one document; an excluded one is an empty unit, which contributes
    exactly 0, as `zero_out` has it.
    """

    def __init__(
        self, real: SampleStore, data: Data, ids: list[np.ndarray], included: np.ndarray
    ) -> None:
        """
        Args:
            data: of the configuration, resolved.
            ids: of each canary's document.
            included: bool (canaries,). SECRET.
        """
        assert data.unit_sampling != "auto"  # resolved at load
        assert data.long_records != "auto"
        super().__init__(
            real.records,
            real.tokenizer,
            real.seq_len,
            real.units,
            unit_sampling=data.unit_sampling,
            long_records=data.long_records,
            reading=real.reading,
            cache=TokenCache(),
        )
        self.first = len(real.units)
        self._planted = [
            Excerpt(one, 0) if is_in else NOTHING
            for one, is_in in zip(ids, included.tolist(), strict=True)
        ]

    def excerpt(
        self,
        unit: int,
        rng: Choices | None = None,
        window: int = 0,
        windows: int = 1,
    ) -> Excerpt:
        if unit < self.first:
            return super().excerpt(unit, rng, window, windows)
        return self._planted[unit - self.first] if window == 0 else NOTHING

    @property
    def sources(self) -> int:
        return super().sources + len(self._planted)  # the last ones are the canaries'

    def chosen(self, unit: int, rng: Choices | None, windows: int) -> np.ndarray:
        if unit >= self.first:
            return np.array([super().sources + unit - self.first])
        return super().chosen(unit, rng, windows)

    def tokens(self, source: int) -> int:
        planted = source - super().sources
        if planted < 0:
            return super().tokens(source)
        return max(len(self._planted[planted].ids) - 1, 0)
