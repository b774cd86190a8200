"""A private run's bookkeeping: its ledger and logs, what it has spent, its keys and its draws.

Guarantee:
    Before the first draw all ranks agree on the records, the terms and all else that noise and
    draws depend on. On rank 0, without which nothing is saved, a line in the log is durable before
    its step's update, and before the noise of its held-out loss. Each key serves once, for one
    step: keys are drawn at each start and at each load, lie in memory alone, and leave this process
    for the other ranks only. A published loss is the mean of clipped losses with noise added once,
    which `privacy.published_loss` bounds.

    `Account.epsilon` is of the weights' own lineage, `epsilon_executed` of every step ever begun in
    the folder, `epsilon_planned` of those and of all that are still planned, which also covers a
    stop that weights decided. None is below the composition of its steps, and none covers a stop
    that followed from losses, norms or other logs, or from a clock.
"""

import dataclasses
import functools
import hashlib
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.base.process import typed, versions
from torchtitan_dp.checkpoint.plan import Plan, config_hash, earlier_ledger, losable, settle
from torchtitan_dp.checkpoint.start import (
    Start,
    check_records,
    plan_start,
    resumed,
    weights_of_node,
)
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import RUN_CONFIG_FILE, write_config
from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.distributed.agreement import (
    broadcast_from_rank0,
    require_agreement,
    shared_root_key,
)
from torchtitan_dp.distributed.devices import kind
from torchtitan_dp.ledger import Lineage, RunLog, Settings, summary, write_fingerprint
from torchtitan_dp.ledger.lineage import NoisedLoss, audited
from torchtitan_dp.ledger.schema import described, released, write_published
from torchtitan_dp.ledger.spending import epsilon, spent
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.privacy.accounting import EpsilonCurve, rounded_up
from torchtitan_dp.privacy.banded import NoiseChain
from torchtitan_dp.privacy.published_loss import noised_mean
from torchtitan_dp.privacy.sampling import allocate, poisson_draw


class Account:
    """The epsilons of a run while it trains, to `total_steps`: computed ahead at a few points, of
    which a query gives the next one up, so that no step waits."""

    def __init__(self, lineage: Lineage, total_steps: int) -> None:
        self._first, self._total = lineage, max(total_steps, lineage.steps)

    def epsilon(self, lineage: Lineage) -> float:
        """Return the epsilon of these weights; infinite if they are not private."""
        return self._taken.at(lineage.steps) if lineage.composes else math.inf

    def epsilon_executed(self, lineage: Lineage) -> float:
        """Return the epsilon of all executed steps of the folder, as published."""
        at = lineage.steps
        return max(self._executed.at(at), self._taken.at(at)) if lineage.composes else math.inf

    def epsilon_planned(self, lineage: Lineage) -> float:
        """Return the epsilon of those steps and of the steps that are still planned."""
        if not lineage.composes:
            return math.inf
        return max(epsilon(lineage, lineage.left), self.epsilon_executed(lineage))

    @functools.cached_property
    def _taken(self) -> EpsilonCurve:
        return self._curve(lost=False)

    @functools.cached_property
    def _executed(self) -> EpsilonCurve:
        return self._curve(lost=True) if self._first.lost else self._taken

    def _curve(self, *, lost: bool) -> EpsilonCurve:
        """Return the curve of this run's steps beside others. Its points follow from the number of
        planned steps, not from the step at which this start began, which a clock may decide."""
        first, terms = self._first, self._first.settings
        return EpsilonCurve(
            spent(dataclasses.replace(first, steps=0), lost=lost),
            terms.mechanism,
            delta=terms.delta,
            accountant=terms.accountant,
            total_steps=self._total,
            first_step=first.steps,
        )


class Bookkeeping:
    """The ledger, log, account and keys of one start. All ranks have the same; rank 0 writes."""

    ledger: Lineage
    """The ledger of the present weights, replaced as steps are taken."""

    def __init__(
        self, config: JobConfig, loader: RecordLoader, start: Start, device: torch.device
    ) -> None:
        """Open the folder's ledger, or begin it: its terms are fixed the first time. `loader` is of
        the training units, `device` the process group's. Collective over the world. ValueError:
        the folder is of other records or terms; Fault: ranks disagree."""
        self._config, self._device = config, device
        self._folder, self._total = config.job.dump_folder, config.training.steps
        self._units = len(loader.units)
        self._ahead: Draw | None = None
        self._round_key: bytes | None = None
        self._is_loaded = False
        check_records(self._folder, loader.fingerprint, loader.settings)
        self.log = RunLog(self._folder)
        self._settle(lambda: plan_start(config, self._units, start, earlier_ledger(self._folder)))
        split = hashlib.sha256(loader.units.tobytes()).hexdigest()
        require_agreement(
            {
                "the records": (loader.fingerprint, split),
                "the tokens": loader.samples.store.fingerprint,
                "the configuration": config_hash(config),
                "the initial weights": weights_of_node(start),
                "the model": repr(shape(config)),  # its config.json is each node's own
                "the versions of packages": (versions(), platform.python_version()),
                # Replicas' noise is compiled for it, and must be the same bit by bit.
                "the kind of device": kind(device),
            }
        )
        if dist.get_rank() == 0:  # all ranks have read the folder
            write_fingerprint(self._folder, loader.fingerprint, loader.settings, loader.describe())
            # What trains no step does not describe the weights.
            if start.step < self._total or not Path(self._folder, RUN_CONFIG_FILE).exists():
                for line in write_config(config):
                    logger.warning(line)

    @property
    def settings(self) -> Settings:
        return self.ledger.settings

    # Steps.

    def draws(self, step: int, loader: RecordLoader) -> tuple[Draw, Draw | None]:
        """Return the draw of a step, and that of the next, made ahead where one is planned; it
        depends on its step's keys alone, and is discarded if the run stops before."""
        draw = self._ahead or self._draw(step, loader)
        self._ahead = self._draw(step + 1, loader) if step < self._total else None
        return draw, self._ahead

    def begin_start(self) -> None:
        """Record, durably, that this start is about to draw its first units. Collective."""
        name = ""
        if dist.get_rank() == 0:
            name = self.log.begin_start(self.ledger, losable(self._config))
        self.ledger = dataclasses.replace(self.ledger, start=broadcast_from_rank0(name))

    def begin_step(self, step: int) -> None:
        """Record, durably, that a step's update is about to happen (`RunLog.begin_step`)."""
        if dist.get_rank() == 0:
            self.log.begin_step(step)

    def end_step(self, step: int) -> None:
        self.ledger = dataclasses.replace(self.ledger, steps=step)

    def saved(self, step: int) -> None:
        if dist.get_rank() == 0:
            self.log.saved(step)

    def may_stop(self, step: int) -> bool:
        """Return whether a run that stops after this step can go on: not inside a round."""
        return step % self.settings.mechanism.round_steps == 0

    def end_start(self) -> None:
        if dist.get_rank() == 0:
            self.log.end_start(self.ledger.steps)

    def mark_audited(self, canaries: int) -> None:
        """Mark the weights as not private, for good: they are trained on canaries, too."""
        self.ledger = audited(self.ledger, canaries)

    # What is saved, loaded and shown.

    def load(self, text: str) -> int:
        """Take over the ledger of weights that were loaded, which may be older than the plan's;
        draw fresh keys, and return the number of their steps. Collective over the world."""
        loaded, before = Lineage.from_json(text), self.ledger
        config, units = self._config, self._units
        self._settle(lambda: settle(config, units, *resumed(config, before, loaded)))
        self._is_loaded = True
        return loaded.steps

    def require_loaded(self) -> None:
        if not self._is_loaded:
            raise RuntimeError("weights were loaded from a checkpoint without its ledger")

    def scalars(self) -> dict[str, float]:
        """Return the public scalars of the steps so far."""
        sigma = self.settings.mechanism.noise_multiplier
        return {"epsilon": self.account.epsilon(self.ledger), "noise_multiplier": sigma}

    def beside_epsilon(self) -> str:
        """Return the words beside epsilon in a step's line: how many steps it counts at once, what
        it is with lost steps, and the target."""
        executed, target = self.account.epsilon_executed(self.ledger), self.settings.target_epsilon
        mechanism = self.settings.mechanism
        at_once = max(mechanism.period, mechanism.round_steps)
        whole = "of the whole run" if at_once >= self._total else f"of {at_once} steps at once"
        words = [whole] if at_once > 1 else []
        if executed > self.account.epsilon(self.ledger):
            words.append(f"with lost steps {rounded_up(executed)}")
        return ", ".join(words + ([] if target is None else [f"target {target:g}"]))

    def publish(self) -> dict[str, Any] | None:
        """Write `privacy.json` on rank 0, and return its content there."""
        if dist.get_rank() != 0:
            return None
        # True of every checkpoint in the folder: none is further than these weights.
        ledger, account = self.ledger, self.account
        executed, planned = account.epsilon_executed(ledger), account.epsilon_planned(ledger)
        content = described(ledger, account.epsilon(ledger), executed, planned)
        write_published(self._folder, content)
        return content

    def exported(self) -> dict[str, Any]:
        """Return the `privacy.json` of the weights as they are exported now."""
        ledger, account = self.ledger, self.account
        return released(ledger, account.epsilon_executed(ledger), account.epsilon_planned(ledger))

    def publish_loss(self, losses: Callable[[], np.ndarray]) -> NoisedLoss | None:
        """Publish the held-out loss of the last weights, if that is yet to be done: rank 0 logs it
        and adds noise to the mean of clipped losses, and no other rank has another mean with the
        same noise. Collective: a broadcast, and `losses`, which returns that of each unit, fp64."""
        terms, step, found = self.ledger.heldout_loss, self.ledger.steps, ""
        if terms is None or not terms.is_due(step):
            return None
        loss_N = losses()
        sigma, clip = terms.noise_multiplier, terms.clip
        if dist.get_rank() == 0:
            self.log.begin_loss(step)
            key = self.loss_keys.take(step)
            found = repr(noised_mean(loss_N, noise_multiplier=sigma, clip=clip, key=key))
        noised = NoisedLoss(step, float(broadcast_from_rank0(found)), sigma * clip / len(loss_N))
        terms = dataclasses.replace(terms, begun=terms.begun + 1, noised=noised)
        self.ledger = dataclasses.replace(self.ledger, heldout_loss=terms)
        return noised

    def summary(self, spent: dict[str, Any]) -> list[str]:
        """Return the last lines of a run that is done, from the content of `privacy.json`."""
        lines = summary(spent)
        if spent["private"] and not self.ledger.is_trial:
            lora = self._config.lora.rank and self._config.lora.export == "adapter"
            base = " --base_model NAME, or --merged (adapters need PEFT: pip install peft)"
            lines.append(f"to publish: {typed('release')} {self._folder} NEW_FOLDER{base * lora}")
        return lines

    def _draw(self, step: int, loader: RecordLoader) -> Draw:
        mechanism = self.settings.mechanism
        if (t := mechanism.round_steps) > 1:
            turn = (step - 1) % t
            if turn == 0:
                self._round_key = self.sampling_keys.take(step)
            assert self._round_key is not None, "no start begins inside a round"
            turns = allocate(self._round_key, len(loader.units), t)
            return Draw(np.flatnonzero(turns == turn), self.window_keys.take(step))
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
        self.loss_keys = root.stream("evaluation")

    def _settle(self, plan: Callable[[], Plan]) -> None:
        """Settle the terms on rank 0, share its ledger, which any rank may write into a checkpoint,
        open its account, and draw fresh keys. Collective over the world."""
        text = plan().ledger.to_json() if dist.get_rank() == 0 else ""
        self.ledger = Lineage.from_json(broadcast_from_rank0(text))
        self.account = Account(self.ledger, self._total)
        self._draw_keys()
