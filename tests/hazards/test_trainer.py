"""Hazards in the trainer and its bookkeeping, by row: their methods, on stand-ins that record the
order of a step, what it draws and divides by. Whole runs show the same later (test_run.py)."""

import dataclasses
import functools
import hashlib
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call, patch

import numpy as np
import pytest
import torch

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from tests import build
from tests.accounts import mechanism, with_terms
from tests.data.stores import store_of
from tests.processes.ranks import on_ranks
from tests.processes.runs import write_records
from torchtitan_dp.base import process
from torchtitan_dp.base.process import Fault
from torchtitan_dp.checkpoint import bookkeeping as module
from torchtitan_dp.checkpoint.start import Start, plan_start
from torchtitan_dp.data import batching
from torchtitan_dp.data.batching import Feed, RecordLoader
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.distributed import agreement
from torchtitan_dp.gradients import step as builder
from torchtitan_dp.ledger import Lineage, Settings
from torchtitan_dp.privacy.clipping import Clip
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import SecureChoices, coins
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.train import spec as train_spec
from torchtitan_dp.train import trainer as train
from torchtitan_dp.train.spec import build_loader
from torchtitan_dp.train.trainer import DPTrainer

SETTINGS = Settings(
    mechanism(1.0, 0.5),
    max_grad_norm=0.5,
    delta=1e-5,
    expected_batch_size=6,
    accountant="rdp",
    sample_rate_source="privacy.sample_rate",
    neighbouring_relation="add_remove",
)
STEP = 3
UPDATE = ["update", "average", "reset"]  # with [ema]
ROOT = bytes(range(32))


@functools.cache
def samples():
    """The samples of short records, whose store stays open when its folder is gone."""
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(["text" * (i + 1) for i in range(12)], Path(folder))
    return Samples(store, 32)


def loader():
    return RecordLoader(samples(), np.arange(1, 11), ranks=1, rank=0, batch_size=1)


def feed():
    return Feed(loader(), (32,), torch.device("cpu"))


def bookkeeping(ledger, config=None):
    """A bookkeeping without a folder, with the keys of `ROOT`."""
    books = module.Bookkeeping.__new__(module.Bookkeeping)
    books._config, books._device = config or build.config(), torch.device("cpu")
    books.ledger, books.log = ledger, MagicMock()
    books._total = books._config.training.steps
    with patch.object(module, "shared_root_key", lambda *_: RootKey(ROOT)):
        books._draw_keys()
    return books


class Step:
    """One `train_step` on stand-ins, the last of a run, and what it did, in order."""

    def __init__(self, monkeypatch, *, sample_rate=0.5, loss=1.0, planned=STEP, secure=False):
        self.did, self.drawn, self.draws, self.positions, self.feed = [], [], [], [], feed()
        draw = module.poisson_draw
        settings = with_terms(SETTINGS, sample_rate=sample_rate)
        settings = dataclasses.replace(settings, secure_noise=secure)
        trainer = self.trainer = MagicMock()
        trainer.step, trainer.device = STEP, torch.device("cpu")
        trainer.job_config = build.config(f"--training.steps={planned}")
        self.books = bookkeeping(Lineage(settings, steps=STEP - 1), trainer.job_config)
        trainer.books = self.books
        trainer.metrics_processor.ntokens_since_last_log = 0
        trainer.gradients.batch_size = 1
        trainer.sample_losses.side_effect = lambda tokens, _: torch.full((len(tokens),), loss)
        trainer.gradients.accumulate_clipped.side_effect = self._accumulate
        self.books.log.begin_step.side_effect = self._begin
        trainer.clipped_sum.reset.side_effect = lambda: self.did.append("reset")
        trainer.dp_optimizer.step.side_effect = self._update
        trainer.average.update.side_effect = lambda: self.did.append("average")

        def record(key, population, sample_rate, *, secure):
            self.drawn.append((key, population, sample_rate))
            self.draws.append(draw(key, population, sample_rate, secure=secure))
            return self.draws[-1]

        monkeypatch.setattr(module, "poisson_draw", record)
        trainer.accumulate = functools.partial(train.DPTrainer.accumulate, trainer)
        trainer.validator.should_validate.return_value = False
        trainer.metrics_processor.should_log.return_value = False
        self.books.publish = lambda: None
        monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
        train.DPTrainer.train_step(trainer, self.feed)

    def _accumulate(self, loss_B, valid_B, positions):
        self.did.append("sample")
        self.positions.extend(positions)
        rejected_B = ~(valid_B & loss_B.isfinite())
        norm_B = loss_B.detach().double()
        return Clip(torch.ones_like(loss_B), rejected_B, norm_B, norm_B > 1)

    def _begin(self, step):
        self.did.append(f"begin {step}")

    def _update(self, total, noise):
        self.did.append("update")
        self.total, self.noise = total, noise


def test_row21_and_46_a_step_is_begun_once_before_its_one_update(monkeypatch):
    step = Step(monkeypatch)
    samples = len(step.draws[0])
    assert samples > 2
    assert step.did == ["sample"] * samples + [f"begin {STEP}", *UPDATE]
    assert step.books.ledger.steps == STEP


def test_row39_with_secure_noise_units_are_drawn_by_shake_256(monkeypatch):
    philox = MagicMock(side_effect=AssertionError("drawn by Philox"))
    monkeypatch.setattr(np.random, "Philox", philox)
    step = Step(monkeypatch, secure=True)
    assert step.draws[0].tolist() == coins(step.drawn[0][0], 10, 0.5).tolist()


def test_row39_with_secure_noise_choices_and_projections_are_shakes(tmp_path):
    data = write_records(tmp_path / "data", 4)
    options = "--privacy.secure_noise", "--data.long_records=window"
    config = build.config(*options, f"--training.dataset_path={data}")
    loader = build_loader(
        None, dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), job_config=config
    )
    assert isinstance(loader.rng(bytes(32), 0), SecureChoices)
    sums = MagicMock()
    sums.groups.cp = None
    with pytest.MonkeyPatch.context() as patch:
        made = MagicMock()
        patch.setattr(builder, "GhostGradients", made)
        builder.BUILD["randomized"](MagicMock(), [], sums, config.privacy)
    assert made.call_args.kwargs["norms"]._secure


@pytest.mark.parametrize("at", ["this draw", "the next one"])
def test_row61_a_step_of_ranks_that_drew_otherwise_is_not_begun(monkeypatch, at):
    """No update, no noise, nothing recorded: gradients of the step go with the process."""
    asked = []

    def with_another_rank(told, op):
        asked.append(told.clone())
        if len(asked) == (1 if at == "this draw" else 2):
            told[1] += 1  # its fingerprint is higher

    world = SimpleNamespace(
        is_initialized=lambda: True, all_reduce=with_another_rank, ReduceOp=MagicMock()
    )
    monkeypatch.setattr(batching, "dist", world)

    class Stopped(Step):
        def __init__(self, *args, **options):
            with pytest.raises(Fault, match="the ranks drew different units"):
                super().__init__(*args, **options)

    step = Stopped(monkeypatch, planned=STEP + 1)
    assert len(step.draws[0]) > 2
    assert set(step.did) <= {"sample"}
    assert ("sample" in step.did) == (at == "the next one")
    assert not step.books.log.begin_step.called
    assert not step.trainer.dp_optimizer.step.called


def test_row76_the_average_follows_weights_that_are_noised(monkeypatch):
    """It is made after the update, once, and is told of nothing: neither sum, draw nor key."""
    step = Step(monkeypatch)
    assert [did for did in step.did if did in UPDATE] == UPDATE
    assert step.trainer.average.mock_calls == [call.update()]


def test_row14_the_optimizer_is_given_the_clipped_sum_itself(monkeypatch):
    """It divides by the expected batch; here nothing does, whatever was drawn."""
    step = Step(monkeypatch)
    assert step.total is step.trainer.clipped_sum.take.return_value


def test_row16_an_empty_draw_is_a_step(monkeypatch):
    step = Step(monkeypatch, sample_rate=1e-12)
    assert len(step.draws[0]) == 0
    assert step.did == [f"begin {STEP}", *UPDATE]
    assert step.books.ledger.steps == STEP
    step.trainer.lr_schedulers.step.assert_called_once_with()


def test_row41_the_sampler_is_given_the_ledgers_rate_and_all_units(monkeypatch):
    step = Step(monkeypatch, sample_rate=0.375)
    key = RootKey(ROOT).stream("sampling").take(STEP)
    assert step.drawn == [(key, len(step.feed.loader.units), 0.375)]


def test_row11_and_41_the_next_draw_is_the_one_it_would_be_in_time(monkeypatch):
    """Of the next step's own keys, each taken once; the last step makes none ahead."""
    step = Step(monkeypatch, planned=STEP + 1)
    stream = RootKey(ROOT).stream("sampling")
    (this, *_), (following, population, rate) = step.drawn
    assert (this, following) == (stream.take(STEP), stream.take(STEP + 1))
    assert (population, rate) == (len(step.feed.loader.units), 0.5)
    ahead = step.books._ahead
    assert ahead.positions.tolist() == step.draws[1].tolist()
    assert ahead.key == RootKey(ROOT).stream("window").take(STEP + 1)
    assert step.did == ["sample"] * len(step.draws[0]) + [f"begin {STEP}", *UPDATE]
    for keys in (step.books.sampling_keys, step.books.window_keys):
        with pytest.raises(RuntimeError, match="spent"):
            keys.take(STEP + 1)
    assert step.books.noise_keys.take(STEP + 1)  # that of the next update is still there


def test_row40_noise_has_a_key_of_its_own(monkeypatch):
    step = Step(monkeypatch)
    assert step.noise.key == RootKey(ROOT).stream("noise").take(STEP)
    assert step.noise.key != step.drawn[0][0]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_row22_and_25_a_bad_loss_changes_no_course(monkeypatch, loss):
    good, bad = Step(monkeypatch), Step(monkeypatch, loss=loss)
    assert bad.did == good.did


@pytest.mark.parametrize("step", [STEP, STEP + 1, STEP + 4])
def test_row58_a_step_draws_from_its_own_group_at_b_times_the_rate(monkeypatch, step):
    settings = dataclasses.replace(SETTINGS, mechanism=Mechanism(1.0, 0.2, column=cut_off(4)))
    groups = [np.arange(g, 40, 4) for g in range(4)]
    rates = []

    def everybody(key, population, rate, *, secure):
        rates.append(rate)
        return np.arange(population)

    monkeypatch.setattr(module, "poisson_draw", everybody)
    of = SimpleNamespace(groups=lambda count: groups)
    drawn, _ = bookkeeping(Lineage(settings)).draws(step, of)
    assert drawn.positions.tolist() == groups[step % 4].tolist()
    assert set(rates) == {0.8}


ALLOCATED = dataclasses.replace(
    SETTINGS, mechanism=Mechanism(1.0, 1 / 5, round_steps=5), sampling="allocation"
)


def rounds_of(books, first, last, units):
    """By round, how often each unit takes part: (rounds, units)."""
    of, took = SimpleNamespace(units=np.arange(units)), np.zeros((last // 5 + 1, units), int)
    books._total = last
    for step in range(first, last + 1):
        drawn, following = books.draws(step, of)
        took[(step - 1) // 5, drawn.positions] += 1
        assert following is None or step < last
    return took[(first - 1) // 5 :]


def test_row74_each_unit_takes_part_in_one_step_of_each_of_2000_rounds_over_resumes():
    books, steps = bookkeeping(Lineage(ALLOCATED)), set()
    took = []
    for first in range(1, 10_000, 500):
        took.append(rounds_of(books, first, first + 499, 8)[:100])
        steps.add(took[-1].tobytes())
        with patch.object(
            module, "shared_root_key", lambda *_, f=first: RootKey(bytes([f % 251]) * 32)
        ):
            books._draw_keys()  # as each start and each load does
    took = np.concatenate(took)
    assert took.shape == (2_000, 8)
    assert (took == 1).all()


def test_row74_a_round_is_not_gone_on_with_after_a_load():
    """Its key is gone, so that what is left of it could repeat a unit, or leave one out."""
    books, of = bookkeeping(Lineage(ALLOCATED)), SimpleNamespace(units=np.arange(8))
    books._total = 10
    books.draws(1, of)
    with patch.object(module, "shared_root_key", lambda *_: RootKey(ROOT)):
        books._draw_keys()
    with pytest.raises(AssertionError, match="no start begins inside a round"):
        books.draws(2, of)


def test_row74_a_stop_waits_for_the_end_of_its_round():
    books = bookkeeping(Lineage(ALLOCATED))
    assert [step for step in range(1, 16) if books.may_stop(step)] == [5, 10, 15]
    assert all(bookkeeping(Lineage(SETTINGS)).may_stop(step) for step in range(1, 4))


# Secrets.


def secrets(debug_seed=None):
    """What two starts derive on this rank: hashes of the keys of all streams."""
    books = bookkeeping(Lineage(SETTINGS))
    books._config.privacy.debug_seed = debug_seed
    found = []
    for _ in range(2):
        books._draw_keys()
        streams = books.sampling_keys, books.noise_keys, books.window_keys, books.loss_keys
        for keys in streams:
            key = keys.take(1)
            key = key if isinstance(key, bytes) else key.key  # of a chain
            found.append(hashlib.sha256(key).hexdigest())
    return found


def test_row11_and_32_all_ranks_hold_one_key_and_each_start_another():
    first, second = on_ranks(2, secrets)
    assert first == second
    assert len(set(first)) == 8


def test_row30_and_45_a_debug_seed_marks_the_run():
    """As a start's plan has it: the trainer's ledger is the plan's."""
    config = build.config()
    ledger = plan_start(config, 10, Start(), None).ledger
    assert (ledger.private, ledger.caveats) == (True, ())
    config.privacy.debug_seed = 7
    ledger = plan_start(config, 10, Start(), None).ledger
    assert ledger.private is False
    assert "privacy.debug_seed" in ledger.caveats[0]


def test_row30_drawing_secrets_tells_nobody(monkeypatch, caplog, capfd):
    from torchtitan.tools.logging import logger

    monkeypatch.setattr(agreement.RootKey, "from_os", classmethod(lambda cls: cls(ROOT)))
    monkeypatch.setattr(agreement.dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(logger, "propagate", True)
    books = bookkeeping(Lineage(SETTINGS))
    with caplog.at_level("DEBUG"):
        books._draw_keys()
    told = caplog.text + "".join(capfd.readouterr())
    for secret in (ROOT, books.noise_keys.take(1).key, books.sampling_keys.take(1)):
        for spelling in (secret.hex(), repr(secret)[2:-1], str(int.from_bytes(secret, "big"))):
            assert spelling not in told


def test_row30_secrets_are_guarded_before_anything_else(monkeypatch):
    """No core dumps, outputs their owner's, workers that die: before the configuration is read."""
    calls, mask = [], os.umask(0o022)
    os.umask(mask)
    for name in ("die_with_parent", "forbid_core_dumps"):
        monkeypatch.setattr(process, name, lambda name=name: calls.append(name))

    def stop(*_):
        calls.append(oct(os.umask(mask)))
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_config", stop)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(KeyboardInterrupt):
        train.main.__wrapped__([])
    assert calls == ["die_with_parent", "forbid_core_dumps", "0o77"]


# The baseline.


@pytest.mark.parametrize("private", [True, False])
def test_row20_only_without_privacy_is_the_shuffling_trainer_built(monkeypatch, private):
    for name in ("DPTrainer", "BaselineTrainer"):
        monkeypatch.setattr(train, name, lambda *_, name=name: SimpleNamespace(name=name))
    config = build.config(*([] if private else ["--privacy.no-enable"]))
    built = train.build_trainer(config, MagicMock())
    assert built.name == ("DPTrainer" if private else "BaselineTrainer")


def test_row20_a_private_step_is_given_the_feed_not_the_loaders_shuffled_batches():
    trainer = MagicMock(model_parts=[torch.nn.Linear(2, 2)])
    trainer.checkpointer.start.resumes = False
    trainer.step = trainer.job_config.training.steps = 5  # nothing left to rehearse
    assert DPTrainer.batch_generator(trainer, trainer.dataloader) is trainer.feed


# Which noise is added.


@pytest.mark.parametrize("secure", [False, True])
def test_row49_the_trainer_adds_noise_as_configured(monkeypatch, secure):
    def start(trainer, _):
        trainer.model_parts, trainer.device = [torch.nn.Linear(3, 2)], torch.device("cpu")
        trainer.parallel_dims = trainer.dataloader = MagicMock()
        trainer.optimizers = MagicMock(optimizers=[MagicMock()])

    books = SimpleNamespace(ledger=Lineage(SETTINGS), settings=SETTINGS)
    monkeypatch.setattr(train_spec.Trainer, "__init__", start)
    monkeypatch.setattr(train, "Bookkeeping", lambda *_: books)
    for name in ("StopRequest", "ReductionGroups", "SampleLosses", "Feed", "trained_fsdp_modules"):
        monkeypatch.setattr(train, name, MagicMock())
    for name in ("Checkpointer", "require_host_memory"):
        monkeypatch.setattr(train_spec, name, MagicMock())
    monkeypatch.setattr(builder, "DPOptimizer", MagicMock())
    monkeypatch.setattr(builder, "BUILD", {"microbatch": MagicMock()})
    options = ["--privacy.secure_noise"] if secure else []
    train.DPTrainer(build.config(*options), MagicMock())
    assert builder.DPOptimizer.call_args.kwargs["secure_noise"] == secure


def test_row74_checkpoints_inside_rounds_are_refused():
    allocation = "--privacy.sampling=allocation", "--privacy.sample_rate=0.26"
    for interval, is_right in ((3, False), (4, True), (6, False), (8, True)):
        config = build.config(
            *allocation, "--checkpoint.enable", f"--checkpoint.interval={interval}"
        )
        if is_right:
            assert plan_start(config, 10, Start(), None).settings.mechanism.round_steps == 4
        else:
            with pytest.raises(ValueError, match=rf"checkpoint\.interval = {interval}: .* 4 steps"):
                plan_start(config, 10, Start(), None)
