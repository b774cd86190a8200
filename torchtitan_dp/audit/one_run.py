"""The one-run canary audit: train once, guess the coins, reveal them, and count right guesses.

Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023), Algorithm 1,
through the trainer itself. Its proof needs this order: scores are computed without the coins,
guesses from scores alone, and they are on disk before the coins are read.

Guarantee:
    If training is (epsilon, delta)-DP, `audit` reports a lower bound above epsilon with probability
    at most 1 - confidence. The audited weights are never private, as their ledger records. Scores
    include noised gradients of the real records: publishing the result spends the ledger's
    `epsilon_executed`, which counts beside other runs'.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from torchtitan_dp.audit.canaries import (
    Canaries,
    CanarySamples,
    CanarySum,
    ScoreKeeper,
    draw_coins,
)
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import ladder
from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.data.feed import Feed
from torchtitan_dp.data.samples import Samples
from torchtitan_dp.privacy.lower_bounds import one_run_epsilon
from torchtitan_dp.process import write_atomically
from torchtitan_dp.train import DPTrainer

GUESSES_FILE = "audit_guesses.json"


@dataclass(frozen=True)
class CanaryAudit:
    """The guesses, and the bound that the right ones prove."""

    scores: np.ndarray  # fp64 (canaries,)
    guesses: np.ndarray  # int8 (canaries,): 1 included, -1 excluded, 0 no guess
    included: np.ndarray  # bool (canaries,)
    result: dict[str, Any]  # the content of `--json`


class PlantedTrainer(DPTrainer):
    """A `DPTrainer` on canaries after the records, each with a secret coin."""

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start], canaries: int) -> None:
        super().__init__(job_config, decide)
        self.ledger = self.ledger.marked_audited(canaries)
        self._coins = draw_coins(self.coin_keys.take(0), canaries)

    def read(self, samples: Samples) -> None:
        """Train on `samples`, in which canaries are numbered after the units."""
        loader, dims, job_config = self.dataloader, self.parallel_dims, self.job_config
        batch = dims.get_mesh("batch") if dims.dp_enabled else None
        # After the base class: sampling rate and noise are those of a run on the records alone.
        self.dataloader = RecordLoader(
            samples,
            np.concatenate([loader.units, len(samples.units) + np.arange(len(self._coins))]),
            ranks=batch.size() if batch else 1,
            rank=batch.get_local_rank() if batch else 0,
            batch_size=job_config.training.local_batch_size,
            windows=loader.windows,
            fingerprint=loader.fingerprint,
            settings=loader.settings,
            secure_draws=job_config.privacy.secure_noise,
        )
        self.feed = Feed(self.dataloader, ladder(job_config), self.device)

    def train_step(self, feed: Feed) -> None:
        super().train_step(feed)
        steps = self.job_config.training.steps
        if dist.get_rank() == 0 and self.step % max(steps // 10, 1) == 0:
            print(f"audit: step {self.step} of {steps}", file=sys.stderr)

    @property
    def _guesses_file(self) -> str:
        return os.path.join(self.job_config.job.dump_folder, GUESSES_FILE)

    def commit(self, scores: np.ndarray, guesses: np.ndarray) -> dict[str, Any]:
        """Write scores and guesses to disk, and return the file's content."""
        content = {"scores": scores.tolist(), "guesses": guesses.tolist()}
        write_atomically(self._guesses_file, json.dumps(content).encode())
        return content

    def unblind(self) -> np.ndarray:
        """Reveal the coins, bool (canaries,), after the guesses are on disk."""
        assert os.path.exists(self._guesses_file)
        return self._coins


class AuditTrainer(PlantedTrainer):
    """A trainer on canaries of gradients, which scores them."""

    clipped_sum_type = CanarySum
    clipped_sum: CanarySum

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start], canaries: int) -> None:
        super().__init__(job_config, decide, canaries)
        samples = CanarySamples(self.dataloader.samples, canaries)
        self.read(samples)
        parameters = self.clipped_sum.parameters
        places = Canaries.choose(parameters, canaries)
        self.clipped_sum.plant(places, self._coins, samples.drawn)
        (optimizer,) = self.optimizers.optimizers
        self._drawn = samples.drawn
        self._keeper = ScoreKeeper(places, parameters, optimizer)

    def train_step(self, feed: Feed) -> None:
        super().train_step(feed)
        assert not self._drawn, "some drawn samples were never clipped"

    def scores(self) -> np.ndarray:
        """Return each canary's gradient, summed over steps, in multiples of one inclusion's.

        Collective over the world; does not read the coins.
        """
        settings = self.ledger.settings
        scale = settings.expected_batch_size / settings.max_grad_norm
        return self._keeper.scores(self.parallel_dims.dp_replicate) * scale


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


def count_right(guesses: np.ndarray, included: np.ndarray) -> int:
    """Count the guesses that the coins confirm."""
    return int(np.sum((guesses == 1) & included) + np.sum((guesses == -1) & ~included))


def audit(
    config: JobConfig,
    decide: Callable[[], Start],
    *,
    canaries: int,
    guesses: int,
    confidence: float,
) -> CanaryAudit:
    """Train once on the configuration's records and `canaries` canaries, and guess.

    Args:
        config: checked; its dump folder is the audit's own.
        guesses: the number of canaries to guess, fixed before training.

    Collective over the world; all ranks return the same.
    """
    trainer = AuditTrainer(config, decide, canaries)
    try:
        trainer.train()
        scores = trainer.scores()
        guessed = guess(scores, guesses)
        if dist.get_rank() == 0:
            trainer.commit(scores, guessed)
        dist.barrier()
        included = trainer.unblind()
    finally:
        trainer.close()
    settings = trainer.ledger.settings
    correct = count_right(guessed, included)
    terms = {"canaries": canaries, "guesses": guesses}
    bound, most = (
        one_run_epsilon(**terms, correct=right, delta=settings.delta, confidence=confidence)
        for right in (correct, guesses)
    )
    claimed = settings.epsilon(trainer.step)
    result = {
        "instrument": "canaries",
        "epsilon_lower_bound": bound,
        "epsilon_claimed": claimed,
        "confidence": confidence,
        "exceeds_claim": bound > claimed,
        "delta": settings.delta,
        "epsilon_lower_bound_if_all_right": most,
        "canaries": canaries,
        "included": int(included.sum()),
        "guesses": guesses,
        "correct": correct,
    }
    return CanaryAudit(scores, guessed, included, result)
