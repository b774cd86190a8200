"""A private run's bookkeeping: its ledger and logs, what it has spent, its keys and its draws.

Guarantee:
    Before the first draw all ranks agree on the records, the terms and all else that noise and
    draws depend on. On rank 0, without which nothing is saved, a line in the log is durable before
    its step's update, and before the noise of its held-out loss. Each key serves once, for one
    step: keys are drawn at each start and at each load, lie in memory alone, and leave this process
    for the other ranks only. A published loss is the mean of clipped losses with noise added once,
    which `privacy.published_loss` bounds.
"""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.checkpoint.plan import earlier_ledger, losable, refuse_overspending
from torchtitan_dp.checkpoint.start import Start, check_records, plan_start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import write_config
from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.distributed.agreement import (
    broadcast_from_rank0,
    require_agreement,
    shared_root_key,
)
from torchtitan_dp.distributed.devices import kind
from torchtitan_dp.ledger import (
    Account,
    Lineage,
    RunLog,
    Settings,
    summary,
    versions,
    write_fingerprint,
)
from torchtitan_dp.ledger.lineage import resumed, rewound
from torchtitan_dp.ledger.settings import NoisedLoss
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.privacy.banded import NoiseChain
from torchtitan_dp.privacy.sampling import allocate, poisson_draw
from torchtitan_dp.process import typed


class Bookkeeping:
    """The ledger, log, account and keys of one start. All ranks have the same; rank 0 writes."""

    ledger: Lineage
    """The ledger of the present weights, replaced as steps are taken."""

    def __init__(
        self, config: JobConfig, loader: RecordLoader, start: Start, device: torch.device
    ) -> None:
        """Open the folder's ledger, or begin it: its terms are fixed the first time.

        Collective over the world.

        Args:
            loader: of the training units; its records are those of the ledger.
            device: the process group's.

        Raises:
            ValueError: one line: the folder is of other records or terms.
            Fault: ranks disagree.
        """
        self._config, self._device = config, device
        self._folder, self._total = config.job.dump_folder, config.training.steps
        self.ledger, self.log = self._open(loader, start)
        self._is_loaded = False
        self._ahead: Draw | None = None
        self._round_key: bytes | None = None
        self._open_account()
        self._draw_keys()

    @property
    def settings(self) -> Settings:
        """The terms of the steps to come."""
        return self.ledger.settings

    # Steps.

    def draws(self, step: int, loader: RecordLoader) -> tuple[Draw, Draw | None]:
        """Return the draw of a step, and that of the next, made ahead where one is planned.

        A draw depends on its step's keys alone, each of which is used once. If the run stops before
        that step, the draw is discarded.
        """
        draw = self._ahead or self._draw(step, loader)
        self._ahead = self._draw(step + 1, loader) if step < self._total else None
        return draw, self._ahead

    def begin_start(self) -> None:
        """Record, durably, that this start is about to draw its first units."""
        if dist.get_rank() == 0:
            self.log.begin_start(self.ledger, losable(self._config))

    def begin_step(self, step: int) -> None:
        """Record, durably, that a step's update is about to happen; raise Fault if more are unsaved
        then than this start declared that it can lose."""
        if dist.get_rank() == 0:
            self.log.begin_step(step)

    def end_step(self, step: int) -> None:
        """Count a step whose update has happened."""
        self.ledger = dataclasses.replace(self.ledger, steps=step)

    def saved(self, step: int) -> None:
        """Record that a checkpoint of a step is durable."""
        if dist.get_rank() == 0:
            self.log.saved(step)

    def may_stop(self, step: int) -> bool:
        """Return whether a run that stops after this step can go on: not inside a round."""
        return step % self.settings.mechanism.round_steps == 0

    def end_start(self) -> None:
        """Record that this start ends with all of its steps saved."""
        if dist.get_rank() == 0:
            self.log.end_start(self.ledger.steps)

    def mark_audited(self, canaries: int) -> None:
        """Mark the weights as not private, for good: they are trained on canaries, too."""
        self.ledger = self.ledger.marked_audited(canaries)

    # What is saved, loaded and shown.

    def load(self, text: str) -> int:
        """Take over the ledger of weights that were loaded, and draw fresh keys.

        The plan has merged the ledger of the chosen checkpoint, so that a mistake is reported
        before the model is built; the ledger that is loaded here may be older, and counts.

        Collective over the world. Returns the number of steps that the weights have taken.
        """
        loaded = Lineage.from_json(text)
        self.ledger = resumed(self.ledger, loaded)
        refuse_overspending(self._config, self.ledger)
        self._is_loaded = True
        self._open_account()
        self._draw_keys()
        return loaded.steps

    def require_loaded(self) -> None:
        """Refuse weights that were loaded without their ledger."""
        if not self._is_loaded:
            raise RuntimeError("weights were loaded from a checkpoint without its ledger")

    def scalars(self) -> dict[str, float]:
        """Return the public scalars of the steps so far."""
        sigma = self.settings.mechanism.noise_multiplier
        return {"epsilon": self.account.epsilon(self.ledger), "noise_multiplier": sigma}

    def beside_epsilon(self) -> str:
        """Return the words beside epsilon in a step's line."""
        return self.account.beside_epsilon(self.ledger, self._config.privacy.target_epsilon)

    def publish(self) -> dict[str, Any] | None:
        """Write `privacy.json` on rank 0, and return its content there."""
        if dist.get_rank() != 0:
            return None
        return self.account.publish(self.ledger, self._folder)

    def exported(self) -> dict[str, Any]:
        """Return the `privacy.json` of the weights as they are exported now."""
        return self.account.exported(self.ledger)

    def publish_loss(self, loss_N: np.ndarray, step: int) -> NoisedLoss:
        """Add noise to the mean of clipped held-out losses, and enter the result into the ledger.

        Rank 0 does so, and sends it to the others: no rank has a result before its line is in the
        log, or has another one with the same noise, so that their difference would be without any.

        Collective: a broadcast over the world. `loss_N` is fp64, one of each unit.
        """
        terms, key, found = self.ledger.heldout_losses, self.evaluation_keys.take(step), ""
        assert terms is not None
        if dist.get_rank() == 0:
            self.log.begin_evaluation()
            found = repr(terms.noise.noised_mean(loss_N, clip=terms.clip, key=key))
        loss = float(broadcast_from_rank0(found))
        deviation = terms.noise.standard_deviation(clip=terms.clip, units=len(loss_N))
        noised = NoisedLoss(step, loss, deviation)
        losses = terms.with_losses(*terms.losses, noised)
        self.ledger = dataclasses.replace(self.ledger, heldout_losses=losses)
        return noised

    def show_summary(self, spent: dict[str, Any]) -> None:
        """Log what a run that is done has spent, from the content of `privacy.json`."""
        for line in summary(spent):
            logger.info(line)
        logger.info(f"outputs: {self._folder}/")
        if spent["private"] and not self.ledger.is_trial:
            logger.info(f"to publish: {typed('release')} {self._folder} NEW_FOLDER")

    def _draw(self, step: int, loader: RecordLoader) -> Draw:
        """Draw a step's units, and take its window key."""
        mechanism = self.settings.mechanism
        if (t := mechanism.round_steps) > 1:
            if (step - 1) % t == 0:
                self._round_key = self.sampling_keys.take(step)
            assert self._round_key is not None, "no start begins inside a round"
            drawn = np.flatnonzero(
                allocate(self._round_key, len(loader.units), t) == (step - 1) % t
            )
            return Draw(drawn, self.window_keys.take(step))
        group = loader.groups(mechanism.period)[step % mechanism.period]
        key, secure = self.sampling_keys.take(step), self.settings.secure_noise
        drawn = poisson_draw(key, len(group), mechanism.draw_rate, secure=secure)
        return Draw(group[drawn], self.window_keys.take(step))

    def _draw_keys(self) -> None:
        """Draw fresh keys. Collective over the world."""
        self._ahead = self._round_key = None  # a round's draws end with it
        root = shared_root_key(self._device, self._config.privacy.debug_seed)
        self.sampling_keys = root.stream("sampling")
        self.noise_keys = NoiseChain(root.stream("noise"), self.settings.mechanism.column)
        self.window_keys = root.stream("window")
        self.projection_keys = root.stream("projection")  # of estimated norms
        self.evaluation_keys = root.stream("evaluation")

    def _open(self, loader: RecordLoader, start: Start) -> tuple[Lineage, RunLog]:
        """Load or plan the ledger, on which all ranks agree, and read the folder's logs."""
        config, folder, units = self._config, self._folder, loader.units
        check_records(folder, loader.fingerprint, loader.settings)
        ledger = plan_start(config, len(units), start, earlier_ledger(folder)).ledger
        split = hashlib.sha256(units.tobytes()).hexdigest()
        require_agreement(
            {
                "the records": (loader.fingerprint, split),
                "the tokens": loader.samples.store.fingerprint,
                "the privacy settings": ledger.settings,
                "the configuration": ledger.config_hash,
                "the model": repr(shape(config)),  # its config.json is each node's own
                "the versions of packages": versions(),
                # Replicas' noise is compiled for it, and must be the same bit by bit.
                "the kind of device": kind(self._device),
            }
        )
        log = RunLog(folder)
        dist.barrier()  # all ranks have read the folder
        if dist.get_rank() == 0:
            write_fingerprint(folder, loader.fingerprint, loader.settings, loader.describe())
            for line in write_config(config):
                logger.info(line)
        return rewound(ledger), log  # until a checkpoint is loaded

    def _open_account(self) -> None:
        """Rebuild the account for the remaining steps, at the start and after each load.

        Collective over the world: any rank may write the ledger into a checkpoint.
        """
        ledger = dataclasses.replace(self.ledger, start=self.log.new_start())
        if dist.get_rank() == 0:
            ledger = self.log.opened(ledger)
        self.ledger = Lineage.from_json(broadcast_from_rank0(ledger.to_json()))
        self.account = Account(self.ledger, self._total)
