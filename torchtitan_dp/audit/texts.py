"""Canaries of text: short documents, each with a secret, and the attack that looks for it.

All are public and harmless, written from templates by a public seed; only which of them were
trained on is secret. The attacker reads the released folder and its public starting weights with
`transformers` alone.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from torchtitan_dp.data.batching import NOTHING, Samples
from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.models.hugging_face_weights import ADAPTER_CONFIG_FILE
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
    """A document with a secret."""

    text: str
    prompt: str  # its beginning, up to where the secret stands for the first time
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
                "canaries are; use --instrument game"
            )
        yield np.concatenate([bos, ids, eos]).astype(np.int64)[:most]


class PlantedSamples(Samples):
    """The samples of units and, numbered after them, of canaries of text.

    An included canary is a unit of one document; an excluded one is an empty unit, which
    contributes exactly 0.
    """

    def __init__(self, real: Samples, ids: list[np.ndarray], included: np.ndarray) -> None:
        """Plant the ids of each canary's document, int64, where `included`, bool (canaries,), which
        is SECRET."""
        keys = ("one_record", "window", "has_answers", "pad_id")
        super().__init__(real.store, real.seq_len, **{key: getattr(real, key) for key in keys})
        planted = zip(ids, included.tolist(), strict=True)
        self._planted = [one if is_in else NOTHING for one, is_in in planted]

    def ids(
        self, unit: int, rng: Choices | None = None, window: int = 0, windows: int = 1
    ) -> np.ndarray:
        if unit < len(self.units):
            return super().ids(unit, rng, window, windows)
        return self._planted[unit - len(self.units)] if window == 0 else NOTHING

    def tokens(self, unit: int, rng: Choices | None = None, windows: int = 1) -> int:
        if unit < len(self.units):
            return super().tokens(unit, rng, windows)
        return max(len(self._planted[unit - len(self.units)]) - 1, 0)


SAMPLED = 8  # generations of each prompt, at temperature 1
_ROWS = 16


def load_model(folder: str, base: str | None, device: torch.device) -> Any:
    """Load a released folder, of weights or of adapters for `base`, in fp32."""
    from transformers import AutoModelForCausalLM

    is_adapter = os.path.exists(os.path.join(folder, ADAPTER_CONFIG_FILE))
    place = folder
    if is_adapter:
        assert base is not None  # adapters are trained on loaded weights alone
        place = base
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    return model.to(device).eval()


@torch.no_grad()
def log_likelihoods(model: Any, ids: list[np.ndarray]) -> np.ndarray:
    """Sum the logarithms of each document's token probabilities, but the first's; fp64 (N,)."""
    found = []
    for start in range(0, len(ids), _ROWS):
        rows = [torch.from_numpy(row).to(model.device) for row in ids[start : start + _ROWS]]
        tokens_BT = pad_sequence(rows, batch_first=True)
        is_text_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        # Padding comes last: a causal model's earlier tokens do not see it.
        log_BTV = model(input_ids=tokens_BT).logits[:, :-1].double().log_softmax(-1)
        log_BT = log_BTV.gather(-1, tokens_BT[:, 1:, None])[..., 0]
        found.append((log_BT * is_text_BT[:, 1:]).sum(-1).cpu().numpy())
    return np.concatenate(found)


def scores(
    model: Any, base: Any | None, ids: list[np.ndarray], canaries: list[TextCanary]
) -> np.ndarray:
    """Score documents: how much likelier the release finds each than its starting weights do.

    Of each domain, the mean is taken away: all of its documents share a template. `base` is None
    where there are no starting weights to compare with. Returns fp64 (N,); a document without a
    finite score gets the least.
    """
    found = log_likelihoods(model, ids)
    if base is not None:
        found = found - log_likelihoods(base, ids)
    finite = np.isfinite(found)
    found = np.where(finite, found, found[finite].min() if finite.any() else 0.0)
    domains = np.array([canary.domain for canary in canaries])
    for domain in np.unique(domains):
        found[domains == domain] -= found[domains == domain].mean()
    return found


@torch.no_grad()
def extracted(
    model: Any, canaries: list[TextCanary], tokenizer: Tokenizer
) -> dict[str, list[bool]]:
    """Let the model go on from each prompt, and look for the secret.

    Returns:
        by canary, "greedy": the most likely tokens spell it; "sampled": one of `SAMPLED`
        generations does.
    """
    torch.manual_seed(0)
    found: dict[str, list[bool]] = {"greedy": [], "sampled": []}
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for canary in canaries:
        prompt, whole = (
            [*bos, *_encoded(tokenizer, text)]
            for text in (canary.prompt, canary.prompt + canary.secret)
        )
        tokens_1T = torch.tensor([prompt], device=model.device)
        terms = {
            "attention_mask": torch.ones_like(tokens_1T),
            "max_new_tokens": max(len(whole) - len(prompt), 1) + 1,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        for how, more in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "num_return_sequences": SAMPLED, "top_k": 0}),
        ):
            rows = model.generate(tokens_1T, **more, **terms)
            texts = (tokenizer.decode(row[len(prompt) :].tolist()).strip() for row in rows)
            found[how].append(any(text.startswith(canary.secret.strip()) for text in texts))
    return found


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    assert ids is not None  # checked with the documents
    return ids.tolist()
