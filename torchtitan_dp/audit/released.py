"""The audit of the released model: train once with canaries of text, export, and attack the export.

Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023), Algorithm 1,
through the trainer itself. The proof needs this order: scores are computed without the coins,
guesses from scores alone, and they are on disk before the coins are read.

Guarantee:
    If training is (epsilon, delta)-DP for the canaries as units, the lower bound is above epsilon
    with probability at most 1 - confidence. The audited weights are never private, as their
    ledger records;
    publishing the result spends its `epsilon_executed`, which counts beside other runs'.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from torchtitan_dp.audit import texts
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.batching import Feed
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.distributed.agreement import broadcast_from_rank0, shared_root_key
from torchtitan_dp.privacy.lower_bounds import one_run_epsilon, rate_upper_bound
from torchtitan_dp.privacy.meaning import meaning
from torchtitan_dp.privacy.sampling import coins
from torchtitan_dp.process import write_atomically
from torchtitan_dp.train import DPTrainer, export_weights

GUESSES_FILE = "audit_guesses.json"
FALSE_ALARMS = 0.01


class TextTrainer(DPTrainer):
    """A `DPTrainer` on the records and, numbered after them, canaries of text with secret coins."""

    def __init__(
        self, job_config: JobConfig, decide: Callable[[], Start], canaries: list[texts.TextCanary]
    ) -> None:
        super().__init__(job_config, decide)
        self.books.mark_audited(len(canaries))
        root = shared_root_key(self.device, job_config.privacy.debug_seed)
        self._included = np.zeros(len(canaries), dtype=bool)
        self._included[coins(root.stream("coin").take(0), len(canaries), 0.5)] = True
        tokenizer = load_tokenizer(job_config.model.hf_assets_path)
        self.ids = list(texts.token_ids(canaries, tokenizer, job_config.training.seq_len + 1))
        # After the base class: sampling rate and noise are those of a run on the records alone.
        loader = self.dataloader
        numbers = len(loader.samples.units) + np.arange(len(canaries))
        loader.units = np.concatenate([loader.units, numbers])
        loader.samples = texts.PlantedSamples(loader.samples, self.ids, self._included)

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


def audit(
    config: JobConfig,
    decide: Callable[[], Start],
    *,
    canaries: int,
    guesses: int,
    confidence: float,
) -> dict[str, Any]:
    """Train once on the records and canaries of text, export, attack, and return the findings.

    The dump folder of `config` is the audit's own. Collective over the world; all ranks return the
    same.
    """
    documents = texts.write_canaries(canaries)
    trainer = TextTrainer(config, decide, documents)
    try:
        trainer.train()
        folder = export_weights(trainer)
        start = decide()
        base = start.initial
        found = _attack(trainer, folder, base, documents, guesses) if dist.get_rank() == 0 else {}
        found = json.loads(broadcast_from_rank0(json.dumps(found)))
        included = trainer.unblind()
    finally:
        trainer.close()
    scores, guessed = np.array(found["scores"]), np.array(found["guesses"], dtype=np.int8)
    each = 1 - (1 - confidence) / 2
    result = {
        "instrument": "text",
        "confidence": confidence,
        "canaries": canaries,
        "included": int(included.sum()),
        "guesses": guesses,
        "detected": detected(scores, included, each),
        "extracted": {
            how: {
                name: int(np.sum(np.array(found[how])[which]))
                for name, which in (("included", included), ("excluded", ~included))
            }
            for how in ("greedy", "sampled")
        },
    }
    correct = int(np.sum((guessed == 1) & included) + np.sum((guessed == -1) & ~included))
    return result | _bounds(trainer, result, correct, confidence)


def _attack(
    trainer: TextTrainer,
    folder: str,
    base_folder: str | None,
    documents: list[texts.TextCanary],
    guesses: int,
) -> dict[str, Any]:
    """Score the documents by the exported folder, commit the guesses, and look for secrets."""
    model = texts.load_model(folder, base_folder, trainer.device)
    base = base_folder and texts.load_model(base_folder, None, trainer.device)
    scores = texts.scores(model, base, trainer.ids, documents)
    content = {"scores": scores.tolist(), "guesses": guess(scores, guesses).tolist()}
    job_config = trainer.job_config
    path = os.path.join(job_config.job.dump_folder, GUESSES_FILE)
    write_atomically(path, json.dumps(content).encode())
    tokenizer = load_tokenizer(job_config.model.hf_assets_path)
    return content | texts.extracted(model, documents, tokenizer)


def _bounds(
    trainer: TextTrainer, result: dict[str, Any], correct: int, confidence: float
) -> dict[str, Any]:
    """Bound epsilon from below, at this confidence, beside what is claimed."""
    settings = trainer.ledger.settings
    claimed = settings.epsilon(trainer.step)
    promised = meaning([settings.segment(trainer.step)], settings.delta)
    terms = {key: result[key] for key in ("canaries", "guesses")} | {"confidence": confidence}
    bound = one_run_epsilon(**terms, correct=correct, delta=settings.delta)
    return {
        "correct": correct,
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
