"""The wiring with TorchTitan: a TrainSpec, its Trainer with our parts, for all runs
and for the baseline without privacy, and a filter of its console's lines."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
import torchtitan
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer

from torchtitan_dp.base.process import VERBOSE, as_faults
from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.plan import baseline_ledger
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.data.dataset import Records, describe
from torchtitan_dp.data.store import mark_used
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.gradients.fsdp import free_gathered
from torchtitan_dp.ledger import PRIVACY_FILE, Lineage
from torchtitan_dp.ledger.schema import TRIAL_FILE, described, to_bytes, write_published
from torchtitan_dp.models.causal_lm.model import CausalLM, HuggingFaceAdapter
from torchtitan_dp.models.ema import ema_of
from torchtitan_dp.models.hugging_face import origin, shape
from torchtitan_dp.models.hugging_face_weights import export
from torchtitan_dp.models.parallelize import build_optimizers, parallelize
from torchtitan_dp.train.check import build_samples, open_records, require_host_memory
from torchtitan_dp.train.processor import LabelledMetricsProcessor, PrivateMetricsProcessor
from torchtitan_dp.train.validate import HeldOutValidator

_TORCHTITAN = str(Path(torchtitan.__file__).parent) + os.sep  # installed beside torchtitan_dp
# Of TorchTitan's own lines at the level of information; our trainer logs steps itself, a run
# without privacy leaves that to TorchTitan.
_SHOWN = re.compile(r"\S*?step: |Training starts|(Saving|Finished saving) the checkpoint")
# Lines that `VERBOSE` shows, TorchTitan's and ours.
_DETAILS = re.compile(
    r"Loading the checkpoint|model: |(not private: )?rehearsal: (done|a microbatch|\{)|"
    r"step: \S+  not private: (averaged weights' )?held-out loss at tokens"
)
_NOTHING_TO_DO = (
    r"ENV\[TORCH_NCCL_ASYNC_ERROR_HANDLING\]",  # set by torchrun, and overridden on purpose
    r"checkpoint\.initial_load_in_hf is True but",  # of every resume, which is what is wanted
    r"torch\.distributed is already initialized\.",  # by an audit, which starts several trainers
    "Error running lspci: ",  # where it is not installed; peak FLOPs follow from the device's name
)
_WARNINGS = (
    # No generator of DTensor's is used.
    r"DTensor (random operators|manual_seed\(\)) may not have complete support",
    "In CPU autocast, but the target dtype is not supported",  # made by TorchTitan, never entered
    "Set timeout is now only supported for either nccl or gloo",  # of groups that have no backend
    r"`torch\.distributed\.distributed_c10d\._set_pg_timeout` is deprecated",  # by TorchTitan
    r"barrier\(\): using the device under current context",  # which is the rank's own
    r"\s*Online softmax is disabled on the fly",  # a hint to Inductor's developers
)


def quiet(logger: logging.Logger) -> None:
    """Hide lines of TorchTitan's logger and warnings of libraries that need no action. Errors and
    all other warnings pass in any case."""
    logger.addFilter(is_shown)
    for handler in logger.handlers:  # TorchTitan's says more than 40 characters before each line
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%d %b %T"))
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def is_shown(record: logging.LogRecord) -> bool:
    """Return whether a line is shown: a filter for `logging`."""
    message = record.getMessage()
    if record.levelno > logging.INFO:
        return not any(re.match(pattern, message) for pattern in _NOTHING_TO_DO)
    if _DETAILS.match(message):
        return bool(os.environ.get(VERBOSE))
    return not record.pathname.startswith(_TORCHTITAN) or bool(_SHOWN.match(message))


def build_model(decide: Callable[[], Start] | None, args: Any) -> CausalLM:
    """Build a model, which draws only the weights that its start does not load."""
    if decide is not None:
        start = decide()
        args.draw_weights, args.draw_adapters = not start.loads, not start.resumes
    return CausalLM(args)


def build_loader(
    records: Records | None, *, dp_world_size: int, dp_rank: int, job_config: JobConfig, **_: Any
) -> RecordLoader:
    """Build the loader of the training units, for one data-parallel rank."""
    records = records or open_records(job_config)
    mark_used(records.store, job_config.job.dump_folder)
    samples = build_samples(records, job_config)
    return RecordLoader(
        samples,
        records.train,
        ranks=dp_world_size,
        rank=dp_rank,
        batch_size=job_config.training.local_batch_size,
        windows=job_config.data.windows_per_draw,
        fingerprint=records.fingerprint,
        settings=records.settings,
        describe=lambda: describe(records.figures(samples), unit_word(job_config)),
        shuffle_seed=job_config.debug.seed or 0,
        secure_draws=job_config.privacy.secure_noise,
    )


def build_metrics(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any
) -> MetricsProcessor:
    """Build our metrics with privacy, TorchTitan's without; both are labelled."""
    processor = PrivateMetricsProcessor if job_config.privacy.enable else LabelledMetricsProcessor
    return processor(job_config, parallel_dims)


def build_validator(
    records: Records | None,
    *,
    job_config: JobConfig,
    dp_world_size: int,
    dp_rank: int,
    parallel_dims: ParallelDims,
    metrics_processor: MetricsProcessor,
    **_: Any,
) -> HeldOutValidator:
    """Build the validator over the held-out units, for one data-parallel rank."""
    records = records or open_records(job_config)
    loader = RecordLoader(
        build_samples(records, job_config),
        records.heldout,
        ranks=dp_world_size,
        rank=dp_rank,
        batch_size=job_config.training.local_batch_size,
    )
    return HeldOutValidator(loader, job_config, parallel_dims, metrics_processor)


def register(
    config: JobConfig, records: Records | None = None, decide: Callable[[], Start] | None = None
) -> None:
    """Register our spec under the name of a run's model, once in this process. `decide`, from
    `checkpoint.start.decision`, says which weights are drawn; by default all are."""
    if config.model.converters:  # of the baseline; `distributed.cpu` leaves them out
        importlib.import_module("torchtitan.components.quantization")
    spec = TrainSpec(
        model_cls=functools.partial(build_model, decide),  # type: ignore[arg-type]
        model_args={config.model.flavor: shape(config)},  # type: ignore[arg-type]
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=functools.partial(build_loader, records),  # type: ignore[arg-type]
        build_tokenizer_fn=lambda config: load_tokenizer(config.model.hf_assets_path),  # type: ignore[arg-type,return-value]
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=functools.partial(build_validator, records),  # type: ignore[arg-type]
        build_metrics_processor_fn=build_metrics,
        state_dict_adapter=HuggingFaceAdapter,
    )
    register_train_spec(config.model.name, spec)


class RunTrainer(Trainer):
    """TorchTitan's Trainer on our records, with our checkpoints and an average of the weights."""

    job_config: JobConfig
    checkpointer: Checkpointer
    dataloader: RecordLoader
    validator: HeldOutValidator

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start]) -> None:
        # Undecorated: @record would keep a traceback of what `main` turns into one line.
        inspect.unwrap(Trainer.__init__)(self, job_config)
        require_host_memory(job_config)  # before any rank takes its part of it
        (model,) = self.model_parts
        self.average = ema_of(job_config, model)
        if job_config.validation.enable:
            self.validator.average = self.average
            trial = os.path.join(job_config.job.dump_folder, TRIAL_FILE)
            self.validator.is_trial = os.path.exists(trial)
        self.checkpointer = Checkpointer(self, decide(), origin(job_config), self.average)

    def train(self) -> None:
        inspect.unwrap(Trainer.train)(self)

    def evaluate_start(self) -> None:
        """Evaluate the starting weights on held-out units. Collectives: the validator's."""
        if self.step == 0 and self.job_config.validation.enable:
            self.validator.validate(self.model_parts, 0)
            self.metrics_processor.time_last_log = time.perf_counter()  # of no step

    def summary(self) -> list[str]:
        """Return the last lines of a run that is done, for the console of rank 0."""
        compared = self.validator.comparison() if self.job_config.validation.enable else None
        return [f"done: {self.step} steps", *([compared] if compared else [])]

    def exported_terms(self) -> dict[str, Any]:
        """Return the `privacy.json` of the weights as they are now."""
        raise NotImplementedError


class BaselineTrainer(RunTrainer):
    """The baseline WITHOUT privacy: TorchTitan's loop on the same data path, and on the same model.
    Its checkpoints, its folder and its exports are marked as not private, permanently."""

    metrics_processor: LabelledMetricsProcessor

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start]) -> None:
        # To TorchTitan a max_norm of 0 means gradients of 0; here it means no clipping.
        job_config.training.max_norm = job_config.training.max_norm or math.inf
        super().__init__(job_config, decide)
        self.ledger = baseline_ledger(job_config, len(self.dataloader.units))
        self._microbatches = 0
        self._publish()

    def batch_generator(self, data_iterable: Any) -> Any:
        """Open the metrics and start the average, after loading; yield TorchTitan's batches."""
        self.metrics_processor.begin(self.step, private=False)
        if self.average is not None:
            self.average.begin()
        self.evaluate_start()
        return super().batch_generator(data_iterable)

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Any
    ) -> Tensor:
        """Add a microbatch's gradient of the step's mean loss; return this rank's part of it."""
        (model,) = self.model_parts
        tokens, labels, more, kwargs = self.post_dataloading_process(input_dict, labels)
        one = torch.ones((), dtype=torch.int64, device=self.device)
        loss = model(tokens, labels=labels, targets=one, **more, **kwargs) / global_valid_tokens
        loss.sum().backward()
        self._microbatches += 1
        if self._microbatches % self.gradient_accumulation_steps == 0:
            free_gathered(model)  # TorchTitan clips by the parameters of modules: sharded ones
        return loss.sum()

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.average is not None:
            self.average.update()

    def train(self) -> None:
        super().train()
        self._publish()

    def state_dict(self) -> dict[str, Any]:
        """Return TorchTitan's entries of a checkpoint, and the ledger."""
        return {**super().state_dict(), "ledger": self._current().to_json()}

    def exported_terms(self) -> dict[str, Any]:
        return described(self._current(), math.inf, math.inf, math.inf)

    def _current(self) -> Lineage:
        return dataclasses.replace(self.ledger, steps=self.step)

    def _publish(self) -> None:
        if dist.get_rank() == 0:
            write_published(self.job_config.job.dump_folder, self.exported_terms())


def export_weights(trainer: RunTrainer) -> str:
    """Export the weights, or their average, as a Hugging Face folder with its `privacy.json`.

    Collective over the world. Returns the folder.
    """
    terms = {PRIVACY_FILE: to_bytes(trainer.exported_terms())}
    average = trainer.average
    swapped = average.in_place_of_weights() if average else contextlib.nullcontext()
    with swapped, as_faults(ValueError):
        return export(trainer.model_parts[0], trainer.job_config, beside=terms)
