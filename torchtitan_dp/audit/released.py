"""The audit of the released model: train once with canaries of text, export, and attack the export.

Canaries are short documents, each with a secret: public and harmless, written from templates by a
public seed; only which of them were trained on is secret. The attacker reads the released folder
and its public starting weights with `transformers` alone.

Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023), Algorithm 1,
through the trainer itself. The proof needs this order: scores are computed without the coins,
guesses from scores alone, and they are on disk before the coins are read.

Guarantee:
    If training is (epsilon, delta)-DP for the canaries as units, the lower bound is above epsilon
    with probability at most 1 - confidence. The audited weights are never private, as their ledger
    records; publishing the result spends its `epsilon_executed`, which counts beside other runs'.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.base.process import write_atomically
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.batching import Feed
from torchtitan_dp.data.dataset import NOTHING, Samples
from torchtitan_dp.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_dp.distributed.agreement import broadcast_from_rank0, shared_root_key
from torchtitan_dp.models.hugging_face_weights import ADAPTER_CONFIG_FILE
from torchtitan_dp.privacy.lower_bounds import one_run_epsilon, rate_upper_bound
from torchtitan_dp.privacy.meaning import meaning
from torchtitan_dp.privacy.sampling import Choices, coins
from torchtitan_dp.train.trainer import DPTrainer, export_weights

GUESSES_FILE = "audit_guesses.json"
FALSE_ALARMS = 0.01
CONFIDENCE = 0.95  # one run's bound is far below a true claim
GUESSED = 0.2  # of the canaries: near the best for claims from 3 to 12
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
            raise ValueError("model.hf_assets_path: no tokenizer of English; use --instrument game")
        yield np.concatenate([bos, ids, eos]).astype(np.int64)[:most]


class PlantedSamples(Samples):
    """The samples of units and, numbered after them, of canaries of text.

    An included canary is a unit of one document; an excluded one is an empty unit, which
    contributes exactly 0.
    """

    def __init__(self, real: Samples, ids: list[np.ndarray], included: np.ndarray) -> None:
        """Plant, where `included` (bool (canaries,), SECRET), the int64 ids of each document."""
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


def load_model(folder: str, base: str | None, device: torch.device) -> Any:
    """Load a released folder, of weights or of adapters for `base`, in fp32."""
    from transformers import AutoModelForCausalLM

    is_adapter = os.path.exists(os.path.join(folder, ADAPTER_CONFIG_FILE))
    place: Any = base if is_adapter else folder  # adapters are trained on loaded weights alone
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    return model.to(device).eval()


@torch.no_grad()
def log_likelihoods(model: Any, ids: list[np.ndarray]) -> np.ndarray:
    """Sum the logarithms of each document's token probabilities, but the first's; fp64 (N,)."""
    found = []
    for row in ids:
        tokens_T = torch.from_numpy(row).to(model.device)
        log_TV = model(input_ids=tokens_T[None]).logits[0, :-1].double().log_softmax(-1)
        found.append(log_TV.gather(-1, tokens_T[1:, None]).sum().item())
    return np.array(found)


def score(
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
def extracted(model: Any, canaries: list[TextCanary], tokenizer: Tokenizer) -> list[bool]:
    """Return, by canary, whether the most likely tokens after its prompt spell the secret."""
    found = []
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for canary in canaries:
        prompt = tokenizer.encode(canary.prompt)
        assert prompt is not None  # checked with the documents
        tokens_1T = torch.tensor([[*bos, *prompt.tolist()]], device=model.device)
        (row,) = model.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            do_sample=False,
            max_new_tokens=len(canary.secret) + 1,
            pad_token_id=0,
            eos_token_id=None,
        )
        text = tokenizer.decode(row[tokens_1T.shape[1] :].tolist()).strip()
        found.append(text.startswith(canary.secret.strip()))
    return found


class TextTrainer(DPTrainer):
    """A `DPTrainer` on the records and, numbered after them, canaries of text with secret coins."""

    def __init__(
        self, job_config: JobConfig, decide: Callable[[], Start], canaries: list[TextCanary]
    ) -> None:
        super().__init__(job_config, decide)
        self.books.mark_audited(len(canaries))
        root = shared_root_key(self.device, job_config.privacy.debug_seed)
        self._included = np.zeros(len(canaries), dtype=bool)
        self._included[coins(root.stream("coin").take(0), len(canaries), 0.5)] = True
        tokenizer = load_tokenizer(job_config.model.hf_assets_path)
        self.ids = list(token_ids(canaries, tokenizer, job_config.training.seq_len + 1))
        # After the base class: sampling rate and noise are those of a run on the records alone.
        loader = self.dataloader
        numbers = len(loader.samples.units) + np.arange(len(canaries))
        loader.units = np.concatenate([loader.units, numbers])
        loader.samples = PlantedSamples(loader.samples, self.ids, self._included)

    def train_step(self, feed: Feed) -> None:
        super().train_step(feed)
        steps = self.job_config.training.steps
        if dist.get_rank() == 0 and self.step % max(steps // 10, 1) == 0:
            print(f"audit: step {self.step} of {steps}", file=sys.stderr)

    def unblind(self) -> np.ndarray:
        """Reveal the coins, bool (canaries,), after the guesses are on disk."""
        assert os.path.exists(os.path.join(self.job_config.job.dump_folder, GUESSES_FILE))
        return self._included


def guess(scores: np.ndarray, guesses: int) -> np.ndarray:
    """Guess 1 for the highest scores and -1 for the lowest, half of `guesses` each, else 0; int8.

    >>> guess(np.array([0.1, 3.0, -1.0, 0.2]), 2).tolist()
    [0, 1, -1, 0]
    """
    order = np.argsort(scores, kind="stable")
    lowest = guesses // 2
    guessed = np.zeros(len(scores), dtype=np.int8)
    guessed[order[:lowest]] = -1
    guessed[order[len(scores) - (guesses - lowest) :]] = 1
    return guessed


def audit(config: JobConfig, decide: Callable[[], Start], *, canaries: int) -> dict[str, Any]:
    """Train once on the records and canaries of text, export, attack, and return the findings.

    The dump folder of `config` is the audit's own. Collective over the world; all ranks return the
    same.
    """
    documents, guesses = write_canaries(canaries), round(GUESSED * canaries)
    trainer = TextTrainer(config, decide, documents)
    found: dict[str, Any] = {}
    try:
        trainer.train()
        folder = export_weights(trainer)
        if dist.get_rank() == 0:
            base = decide().initial
            model = load_model(folder, base, trainer.device)
            before = base and load_model(base, None, trainer.device)
            scores = score(model, before, trainer.ids, documents)
            found = {"scores": scores.tolist(), "guesses": guess(scores, guesses).tolist()}
            path = os.path.join(config.job.dump_folder, GUESSES_FILE)
            write_atomically(path, json.dumps(found).encode())
            tokenizer = load_tokenizer(config.model.hf_assets_path)
            found["spelt"] = extracted(model, documents, tokenizer)
        found = json.loads(broadcast_from_rank0(json.dumps(found)))
        included = trainer.unblind()
    finally:
        trainer.close()
    scores, guessed = np.array(found["scores"]), np.array(found["guesses"], dtype=np.int8)
    correct = int(np.sum((guessed == 1) & included) + np.sum((guessed == -1) & ~included))
    settings = trainer.ledger.settings
    claimed = settings.epsilon(trainer.step)
    promised = meaning([settings.segment(trainer.step)], settings.delta)
    spelt = np.array(found["spelt"])
    terms = {"canaries": canaries, "guesses": guesses, "correct": correct}
    bound = one_run_epsilon(**terms, delta=settings.delta, confidence=CONFIDENCE)
    return {
        "instrument": "text",
        "confidence": CONFIDENCE,
        **terms,
        "included": int(included.sum()),
        "detected": detected(scores, included, 1 - (1 - CONFIDENCE) / 2),
        "extracted": {
            "greedy": {
                "included": int(spelt[included].sum()),
                "excluded": int(spelt[~included].sum()),
            }
        },
        "delta": settings.delta,
        "epsilon_lower_bound": bound,
        "epsilon_claimed": claimed if math.isfinite(claimed) else None,
        "exceeds_claim": bound > claimed,
        "detected_at_most": dict(promised.detected)[FALSE_ALARMS],
    }


def detected(scores: np.ndarray, included: np.ndarray, confidence: float) -> dict[str, float]:
    """Measure the share of included canaries above all but `FALSE_ALARMS` of the excluded ones.

    Returns:
        `share`, and Clopper and Pearson's interval, each end at `confidence`, of that threshold.

    >>> scores, included = np.arange(200.0), np.arange(200) >= 100
    >>> detected(scores, included, 0.95)["share"]
    1.0
    """
    excluded, members = np.sort(scores[~included]), scores[included]
    if len(excluded) == 0 or len(members) == 0:
        return {"share": 0.0, "at_least": 0.0, "at_most": 1.0}
    allowed = int(FALSE_ALARMS * len(excluded))
    hits, count = int(np.sum(members > excluded[len(excluded) - 1 - allowed])), len(members)
    return {
        "share": hits / count,
        "at_least": 1 - rate_upper_bound(count - hits, count, confidence),
        "at_most": rate_upper_bound(hits, count, confidence),
    }
