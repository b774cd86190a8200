"""The audit of the released model: train once with canaries of text, export, and attack the export.

The game is that of `audit.one_run` (Steinke et al. 2023, Algorithm 1), the attacker is another: it
has the Hugging Face folder that a run would release and its public starting weights, no gradient.

Guarantee:
    If training is (epsilon, delta)-DP, and mu-Gaussian-DP but for a probability, for the canaries
    as units, one of both lower bounds is above its truth with probability at most 1 - confidence:
    each has half of the risk. Guesses are on disk before a coin is read. The audited weights are
    never private, as their ledger records; publishing the result spends its `epsilon_executed`.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from torchtitan_dp.audit import texts
from torchtitan_dp.audit.one_run import CanaryAudit, PlantedTrainer, count_right, guess
from torchtitan_dp.audit.texts import TextCanary, text_samples, token_ids, write_canaries
from torchtitan_dp.checkpoint.start import Start, Weights
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.distributed.agreement import broadcast_from_rank0
from torchtitan_dp.ledger.spending import own
from torchtitan_dp.privacy.lower_bounds import one_run_epsilon, one_run_mu, rate_upper_bound
from torchtitan_dp.privacy.meaning import meaning
from torchtitan_dp.train import export_weights

FALSE_ALARMS = 0.01


class TextTrainer(PlantedTrainer):
    """A `DPTrainer` on canaries of text after the records."""

    def __init__(
        self, job_config: JobConfig, decide: Callable[[], Start], canaries: list[TextCanary]
    ) -> None:
        super().__init__(job_config, decide, len(canaries))
        samples, most = self.dataloader.samples, job_config.training.seq_len + 1
        tokenizer = load_tokenizer(job_config.model.hf_assets_path)
        self.ids = list(token_ids(canaries, tokenizer, most))
        self.read(text_samples(samples, self.ids, self._coins))


def audit(
    config: JobConfig,
    decide: Callable[[], Start],
    *,
    canaries: int,
    guesses: int,
    confidence: float,
) -> CanaryAudit:
    """Train once on the configuration's records and canaries of text, export, and texts.

    Args: those of `one_run.audit`.

    Collective over the world; all ranks return the same.
    """
    documents = write_canaries(canaries)
    trainer = TextTrainer(config, decide, documents)
    try:
        trainer.train()
        folder = export_weights(trainer)
        tokenizer = load_tokenizer(config.model.hf_assets_path)
        start = decide()
        base_folder = start.place if start.weights is Weights.INITIAL_HF else None
        found = ""
        if dist.get_rank() == 0:
            model = texts.load_model(folder, base_folder, trainer.device)
            base = None
            if base_folder is not None:
                base = texts.load_model(base_folder, None, trainer.device)
            scores = texts.scores(model, base, trainer.ids, documents)
            guessed = guess(scores, guesses)
            content = trainer.commit(scores, guessed)
            spelt = texts.extracted(model, documents, tokenizer)
            found = json.dumps(content | {how: hits.tolist() for how, hits in spelt.items()})
        shared = json.loads(broadcast_from_rank0(found))
        included = trainer.unblind()
    finally:
        trainer.close()
    scores, guessed = np.array(shared["scores"]), np.array(shared["guesses"], dtype=np.int8)
    spelt = {how: np.array(shared[how]) for how in ("greedy", "sampled")}
    settings = trainer.ledger.settings
    claimed = settings.epsilon(trainer.step)
    promised = meaning(own(trainer.ledger, trainer.step), settings.delta)
    correct = count_right(guessed, included)
    each = 1 - (1 - confidence) / 2
    terms: dict[str, Any] = {"canaries": canaries, "guesses": guesses, "confidence": each}
    bound = one_run_epsilon(**terms, correct=correct, delta=settings.delta)
    mu, most = (
        one_run_mu(**terms, correct=right, but_for=promised.mu_but_for)
        for right in (correct, guesses)
    )
    result = {
        "instrument": "text",
        "epsilon_lower_bound": bound,
        "epsilon_claimed": claimed if math.isfinite(claimed) else None,
        "confidence": confidence,
        "exceeds_claim": bound > claimed or mu > promised.mu,
        "delta": settings.delta,
        "mu_lower_bound": mu,
        "mu_lower_bound_if_all_right": most,
        "mu_claimed": promised.mu if math.isfinite(promised.mu) else None,
        "mu_but_for": promised.mu_but_for,
        "canaries": canaries,
        "included": int(included.sum()),
        "guesses": guesses,
        "correct": correct,
        "detected": detected(scores, included, each),
        "detected_at_most": dict(promised.detected)[FALSE_ALARMS],
        "extracted": {
            how: {"included": int(hits[included].sum()), "excluded": int(hits[~included].sum())}
            for how, hits in spelt.items()
        },
    }
    return CanaryAudit(scores, guessed, included, result)


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
    hits = int(np.sum(members > excluded[len(excluded) - 1 - allowed]))
    count = len(members)
    return {
        "share": hits / count,
        "at_least": 1 - rate_upper_bound(count - hits, count, confidence),
        "at_most": rate_upper_bound(hits, count, confidence),
    }
