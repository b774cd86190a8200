"""Hazards in the trainer itself, by row: its methods, called on stand-ins that record.

What whole runs show of the same (test_run.py, ../test_resume.py) takes half a minute; here the
order of a step, what it draws and divides by, and what it saves are looked at directly.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.ranks import on_ranks
from torchtitan_dp.ledger import Account, ExecutedSteps, Ledger, Settings
from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.privacy.keys import RootKey

SETTINGS = Settings(
    noise_multiplier=1.0,
    sample_rate=0.5,
    max_grad_norm=0.5,
    delta=1e-5,
    expected_batch_size=6,
    accountant="rdp",
    sample_rate_source="privacy.sample_rate",
    neighbouring_relation="add_remove",
)
STEP = 3
ROOT = bytes(range(32))


class Texts:
    """A store of short records."""

    fingerprint = "f" * 64

    def __len__(self):
        return 12

    def read(self, index, max_bytes=None):
        return "text" * (index + 1)


def loader():
    from torchtitan_dp.data.loading import RecordLoader
    from torchtitan_dp.data.samples import SampleStore
    from torchtitan_dp.data.tokenizer import ByteTokenizer

    samples = SampleStore(Texts(), ByteTokenizer(), 32)
    return RecordLoader(samples, np.arange(1, 11), ranks=1, rank=0, batch_size=1)


class Step:
    """One `train_step` on stand-ins, and what it did, in order."""

    def __init__(self, monkeypatch, *, sample_rate=0.5, loss=1.0):
        from tests import build
        from torchtitan_dp import train

        self.did, self.drawn, self.loader = [], [], loader()
        root, draw = RootKey(ROOT), train.poisson_draw
        settings = dataclasses.replace(SETTINGS, sample_rate=sample_rate)
        trainer = self.trainer = MagicMock()
        trainer.step, trainer.device = STEP, torch.device("cpu")
        trainer.job_config = build.config()
        trainer.ledger = Ledger(settings, steps=STEP - 1)
        trainer.sampling_keys, trainer.noise_keys = root.stream("sampling"), root.stream("noise")
        trainer.window_keys = root.stream("window")
        trainer.metrics_processor.ntokens_since_last_log = 0
        trainer.gradients.batch_size = 1
        trainer.sample_losses.side_effect = lambda tokens, _: torch.full((len(tokens),), loss)
        trainer.gradients.accumulate_clipped.side_effect = self._accumulate
        trainer.executed.begin.side_effect = self._begin
        trainer.clipped_sum.reset.side_effect = lambda: self.did.append("reset")
        trainer.dp_optimizer.step.side_effect = self._update

        def record(key, population, sample_rate):
            self.drawn.append((key, population, sample_rate))
            self.draw = draw(key, population, sample_rate)
            return self.draw

        monkeypatch.setattr(train, "poisson_draw", record)
        monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
        train.DPTrainer.train_step(trainer, self.loader)

    def _accumulate(self, loss_B, valid_B):
        self.did.append("sample")
        rejected_B = ~(valid_B & loss_B.isfinite())
        return Clip(torch.ones_like(loss_B), rejected_B, loss_B.double())

    def _begin(self, step, settings):
        assert settings is self.trainer.ledger.settings
        self.did.append(f"begin {step}")

    def _update(self, total, key):
        self.did.append("update")
        self.total, self.key = total, key


def test_row21_and_46_a_step_is_begun_once_before_its_one_update(monkeypatch):
    step = Step(monkeypatch)
    samples = len(step.draw)
    assert samples > 2
    assert step.did == ["sample"] * samples + [f"begin {STEP}", "update", "reset"]
    assert step.trainer.ledger.steps == STEP


def test_row14_the_optimizer_is_given_the_clipped_sum_itself(monkeypatch):
    """It divides by the expected batch; here nothing does, whatever was drawn."""
    step = Step(monkeypatch)
    assert step.total is step.trainer.clipped_sum.take.return_value


def test_row16_an_empty_draw_is_a_step(monkeypatch):
    step = Step(monkeypatch, sample_rate=1e-12)
    assert len(step.draw) == 0
    assert step.did == [f"begin {STEP}", "update", "reset"]
    assert step.trainer.ledger.steps == STEP
    step.trainer.lr_schedulers.step.assert_called_once_with()


def test_row41_the_sampler_is_given_the_ledgers_rate_and_all_units(monkeypatch):
    step = Step(monkeypatch, sample_rate=0.375)
    key = RootKey(ROOT).stream("sampling").take(STEP)
    assert step.drawn == [(key, len(step.loader.units), 0.375)]


def test_row40_noise_has_a_key_of_its_own(monkeypatch):
    step = Step(monkeypatch)
    assert step.key == RootKey(ROOT).stream("noise").take(STEP)
    assert step.key != step.drawn[0][0]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_row22_and_25_a_bad_loss_changes_no_course(monkeypatch, loss):
    good, bad = Step(monkeypatch), Step(monkeypatch, loss=loss)
    assert bad.did == good.did


# Secrets.


def secrets(debug_seed=None):
    """What two starts derive on this rank: hashes of the keys of all streams."""
    from tests import build
    from torchtitan_dp.train import DPTrainer

    trainer = SimpleNamespace(job_config=build.config(), device=torch.device("cpu"))
    trainer.job_config.privacy.debug_seed = debug_seed
    found = []
    for _ in range(2):
        DPTrainer._draw_secrets(trainer)
        streams = trainer.sampling_keys, trainer.noise_keys, trainer.window_keys, trainer.coin_keys
        for keys in streams:
            found.append(hashlib.sha256(keys.take(1)).hexdigest())
    return found


def test_row11_and_32_all_ranks_hold_one_key_and_each_start_another():
    first, second = on_ranks(2, secrets)
    assert first == second
    assert len(set(first)) == 8


def test_row30_a_debug_seed_repeats_its_keys():
    for found in on_ranks(2, secrets, 7):
        assert found[:4] == found[4:]


def test_row30_and_45_a_debug_seed_marks_the_run():
    """As a start's plan has it: the trainer's ledger is the plan's."""
    from tests import build
    from torchtitan_dp.ledger.terms import make_plan

    config = build.config()
    ledger = make_plan(config, 10, None, "f" * 64).ledger
    assert (ledger.private, ledger.caveats) == (True, [])
    config.privacy.debug_seed = 7
    ledger = make_plan(config, 10, None, "f" * 64).ledger
    assert ledger.private is False
    assert "privacy.debug_seed" in ledger.caveats[0]


def test_row30_secrets_are_guarded_before_anything_else(monkeypatch):
    """No core dumps, outputs their owner's, workers that die: before the configuration is read."""
    from torchtitan_dp import process, train

    calls, mask = [], os.umask(0o022)
    os.umask(mask)
    for name in ("die_with_parent", "forbid_core_dumps"):
        monkeypatch.setattr(process, name, lambda name=name: calls.append(name))

    def stop(*_):
        calls.append(oct(os.umask(mask)))
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_config", stop)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(KeyboardInterrupt):
        train.main.__wrapped__([])
    assert calls == ["die_with_parent", "forbid_core_dumps", "0o77"]


# Checkpoints.


def saving(**changes):
    from tests import build

    return SimpleNamespace(
        clipped_sum=SimpleNamespace(accumulating=False),
        ledger=Ledger(SETTINGS, steps=STEP),
        job_config=build.config(),
        step=STEP,
        ntokens_seen=12_345,  # what was really seen
        **changes,
    )


def test_row44_a_checkpoint_holds_expectations_and_the_ledger():
    from torchtitan_dp.train import DPTrainer

    trainer = saving()
    state = DPTrainer.state_dict(trainer)
    assert set(state) == {"step", "ntokens_seen", "ledger"}
    assert state["step"] == STEP
    assert state["ntokens_seen"] == STEP * 6 * trainer.job_config.training.seq_len
    assert Ledger.from_json(state["ledger"]) == trainer.ledger
    trainer.clipped_sum.accumulating = True
    with pytest.raises(RuntimeError, match="un-noised"):
        DPTrainer.state_dict(trainer)


def test_row44_a_loader_saves_nothing_of_its_draws():
    one = loader()
    draw = np.array([1, 2])
    list(one.microbatches(draw))
    assert one.state_dict() == {}


def accumulating():
    from tests import build

    built = build.build()
    built.accumulate(*build.data(samples=1))
    during = built.gradients.clipped_sum.accumulating
    built.gradients.clipped_sum.reset()
    return during, built.gradients.clipped_sum.accumulating


def test_row44_a_sum_says_that_it_is_accumulating():
    assert on_ranks(1, accumulating) == [(True, False)]


def loading(ledger):
    from tests import build

    did = []
    trainer = SimpleNamespace(
        job_config=build.config(),
        ledger=ledger,
        _open_account=lambda: did.append(f"account from {trainer.ledger.steps}"),
        _draw_secrets=lambda: did.append("secrets"),
        step=0,
    )
    return did, trainer


def test_row11_and_31_loading_takes_the_step_and_fresh_secrets():
    from torchtitan_dp.train import DPTrainer

    did, trainer = loading(Ledger(SETTINGS))
    DPTrainer.load_state_dict(trainer, DPTrainer.state_dict(saving()))
    assert (trainer.step, trainer.ledger.steps) == (STEP, STEP)
    assert did == [f"account from {STEP}", "secrets"]


@pytest.mark.parametrize(
    "change", [{"delta": 1e-4}, {"noise_multiplier": 9.0}, {"sample_rate": 0.25}], ids=str
)
def test_row31_a_checkpoint_under_other_terms_is_not_loaded(change):
    from torchtitan_dp.train import DPTrainer

    (changed,) = change.values()
    _, trainer = loading(Ledger(dataclasses.replace(SETTINGS, **change)))
    with pytest.raises(ValueError, match=rf"= {changed}: this run was started with"):
        DPTrainer.load_state_dict(trainer, DPTrainer.state_dict(saving()))


def test_row45_not_private_is_loaded_with_the_weights():
    from torchtitan_dp.train import DPTrainer

    earlier = saving()
    earlier.ledger.mark_not_private("a seed")
    _, trainer = loading(Ledger(SETTINGS))
    DPTrainer.load_state_dict(trainer, DPTrainer.state_dict(earlier))
    assert trainer.ledger.private is False
    assert "a seed" in trainer.ledger.caveats


def test_row45_weights_loaded_without_their_ledger_are_not_trained_on():
    from torchtitan_dp.train import DPTrainer

    trainer = MagicMock(_ledger_loaded=False, model_parts=[torch.nn.Linear(2, 2)])
    trainer.checkpointer.resumes = True
    with pytest.raises(RuntimeError, match="without its ledger"):
        DPTrainer.batch_generator(trainer, [])


# The ledger at a start.


def opened(folder, *overrides):
    """The ledger that a start in this folder opens."""
    from tests import build
    from torchtitan_dp.train import DPTrainer

    config = build.config(f"--job.dump_folder={folder}", *overrides)
    trainer = SimpleNamespace(
        job_config=config,
        dataloader=SimpleNamespace(fingerprint="f" * 64, units=np.arange(10)),
        _require_agreement=lambda terms: None,
    )
    ledger, executed = DPTrainer._open_ledger(trainer)
    return ledger.to_json(), executed.count


def stopped_after_a_step(folder, ledger):
    """What a run that was killed after its first step leaves behind."""
    executed = ExecutedSteps(str(folder))
    Account(ledger, executed, total_steps=10).publish(str(folder))
    executed.begin(1, ledger.settings)


BY_TARGET = ("--privacy.noise_multiplier=None", "--privacy.target_epsilon=8")


def test_row15_and_31_and_45_a_start_goes_on_from_the_folders_ledger(tmp_path):
    """Sigma is read, not found again; "not private" stays; steps begun are counted."""
    first, count = on_ranks(1, opened, str(tmp_path), *BY_TARGET)[0]
    assert count == 0
    kept = json.loads(first)
    kept["settings"]["noise_multiplier"] *= 1.01
    earlier = Ledger.from_json(json.dumps(kept))
    earlier.mark_not_private("a seed")
    stopped_after_a_step(tmp_path, earlier)
    second, count = on_ranks(1, opened, str(tmp_path), *BY_TARGET)[0]
    again = Ledger.from_json(second)
    assert again.settings == earlier.settings
    assert (again.private, again.caveats, count) == (False, ["a seed"], 1)


def test_row15_q_is_the_batch_over_the_training_units(tmp_path):
    settings = json.loads(on_ranks(1, opened, str(tmp_path))[0][0])["settings"]
    assert settings["sample_rate"] == 4 / 10


def test_row31_a_longer_run_may_not_overshoot_its_target(tmp_path):
    (text, _), *_ = on_ranks(1, opened, str(tmp_path), *BY_TARGET, "--training.steps=10")
    stopped_after_a_step(tmp_path, Ledger.from_json(text))
    with pytest.raises(AssertionError, match=re.escape("privacy.target_epsilon = 8")):
        on_ranks(1, opened, str(tmp_path), *BY_TARGET, "--training.steps=20")


def test_row23_no_noise_is_not_private(tmp_path):
    text, _ = on_ranks(1, opened, str(tmp_path), "--privacy.noise_multiplier=0")[0]
    assert Ledger.from_json(text).private is False


# The baseline.


@pytest.mark.parametrize("private", [True, False])
def test_row20_only_without_privacy_is_the_shuffling_trainer_built(monkeypatch, private):
    from tests import build
    from torchtitan_dp import train

    for name in ("DPTrainer", "Trainer"):
        monkeypatch.setattr(train, name, lambda config, name=name: SimpleNamespace(name=name))
    monkeypatch.setattr(train, "Checkpointer", lambda trainer: f"of {trainer.name}")
    config = build.config(*([] if private else ["--privacy.no-enable"]))
    built = train.build_trainer(config)
    assert built.name == ("DPTrainer" if private else "Trainer")


def test_row20_a_private_step_is_given_the_loader_not_its_shuffled_batches():
    from torchtitan_dp.train import DPTrainer

    one = loader()
    trainer = MagicMock(model_parts=[torch.nn.Linear(2, 2)])
    trainer.checkpointer.resumes = False
    assert DPTrainer.batch_generator(trainer, one) is one
