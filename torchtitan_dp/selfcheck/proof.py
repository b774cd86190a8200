"""A proof at each start: gradients of a model of transformers are those of transformers.

Before step 1 a tiny model of the same class and settings takes steps on the run's own mesh, with
its load balancer, checkpointing, chunks of the loss and adapters. Each sample's norm, and the sum
of clipped gradients, are compared with those of transformers' eager model in fp64. Runs in bf16 are
proved in fp32: rounding to 16 bits would hide a fault of some thousandths.

Guarantee:
    No record is read, and training's state is unchanged: its weights, sums, key streams and RNG.
    The process's ring is configured once more, as the run's own settings have it.
"""

import contextlib
import copy
import dataclasses
import gc
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.base.process import Fault
from torchtitan_dp.config import JobConfig
from torchtitan_dp.distributed.agreement import is_lost_rank
from torchtitan_dp.distributed.devices import has_accelerator
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.parameters import copy_slice_, normal_of_name
from torchtitan_dp.selfcheck.reference import (
    group_names,
    make_samples,
    norm,
    reference_gradients,
    reference_model,
    reference_sum,
    relative_error,
)
from torchtitan_dp.selfcheck.small import Mesh, Small, Terms, poisoned, scaled

BOUND = 1e-4
"""The largest relative error. Rounding to fp32 makes one below 1e-5; what was left out of models on
purpose, so far, one of 0.04 or more (tests/selfcheck/test_proof.py)."""

REMEDY = (
    "do not train this model so; parallelism.context_parallel_degree = 1, training."
    "loss_chunk_tokens = 0 or activation_checkpoint.mode = 'none' may pass"
)
_EIGHTHS = (5, 2, 0)
_SAMPLES = 3  # of other tokens: one ends early, one nowhere, one is padded
_MOST_TOKENS = 1024  # of a sample, beyond which the eager model would take long
_SAFETY = 1e-5  # by which `clip` stays below C


def prove(trainer: Any) -> None:
    """Compare gradients on the mesh of a `DPTrainer` with transformers' own; log error and time.

    Collective over the world.

    Raises:
        Fault: the same on all ranks: an error above `BOUND`, or a step that failed on some rank.
    """
    (model,) = trainer.model_parts
    args, begun = model.model_args, time.perf_counter()
    mine, failed = math.nan, ""
    mesh = trainer.parallel_dims, trainer.clipped_sum.groups
    try:
        with undisturbed(trainer.device):
            mine = worst_error(_tiny(trainer.job_config, args), trainer.device, mesh)
    except Exception as error:
        if is_lost_rank(error):
            raise
        failed = f"{type(error).__name__}: {error}"
    found: list[tuple[str, float]] = [(failed, mine)] * dist.get_world_size()
    dist.all_gather_object(found, (failed, mine))
    gc.collect()  # FSDP2's modules hold each other, and the rehearsal needs the memory
    seconds = time.perf_counter() - begun
    trainer.metrics_processor.time_last_log += seconds
    kind, where = args.settings["model_type"], "check of the model before step 1"
    for rank, (line, _) in enumerate(found):
        if line:
            raise Fault(f"{where}: a tiny {kind} fails on rank {rank}: {line}")
    worst = float(np.max([value for _, value in found]))  # NaN if any is
    if not worst <= BOUND:
        raise Fault(
            f"{where}: per-sample gradients of a tiny {kind}, with these settings on this mesh, "
            f"are {worst:.2g} off those of transformers' own (the limit is {BOUND:g}): {REMEDY}"
        )
    logger.info(
        f"checked: per-sample gradients of a tiny {kind} on this mesh are transformers' within "
        f"{worst:.0e} ({seconds:.1f} s)"
    )


def lengths(terms: Terms, eighths: Sequence[int] = _EIGHTHS) -> list[int]:
    """Return lengths of samples, in eighths of the longest: one beyond all windows, one within all
    of them, and the shortest, whose tokens leave some experts out."""
    step = 2 * terms.degrees[2]
    return [max(terms.args.max_seq_len * n // 8 // step * step, step) for n in eighths]


def _tiny(config: JobConfig, args: ModelArgs) -> Terms:
    """Return a run's terms in fp32, with samples that the eager model computes at once."""
    config = copy.deepcopy(config)
    config.training.mixed_precision_param = "float32"
    if has_accelerator():
        args = dataclasses.replace(args, n_kv_heads=args.n_heads)  # the ring's fp32 kernels need it
    cp = config.parallelism.context_parallel_degree
    terms = scaled(config, args, tokens=max(min(64, _MOST_TOKENS // cp // 8 * 8), 8))
    terms.args.draw_weights = terms.args.draw_adapters = False  # type: ignore[attr-defined]
    return terms


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the RNG, and spare the console what transformers says of tiny configurations."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        logging.set_verbosity(verbosity)


def worst_error(
    terms: Terms, device: torch.device, mesh: Mesh | None = None, eighths: Sequence[int] = _EIGHTHS
) -> float:
    """Return the largest relative error of a norm or a sum, of samples of some lengths, the last of
    them in `poisoned` memory, on this rank. Collective over the world."""
    privacy, weights = terms.config.privacy, torch.ones(_SAMPLES)
    eager = reference_model(terms.args).double()
    fill_(eager)
    cases = []
    for tokens in lengths(terms, eighths):
        args = copy.copy(terms.args)
        args.max_seq_len = tokens
        cases.append(make_samples(args, _SAMPLES)[:2])
    true = [[norm(g) for g in reference_gradients(eager, *case, weights)] for case in cases]
    C = (min(true[0]) + max(true[0])) / 2  # some are clipped, some are not
    ours = Small(terms, device, max_grad_norm=C, on=mesh)
    fill_(ours.model)
    ours.model.train()  # as TorchTitan does
    replicate, shard, _ = terms.degrees
    drawn = np.arange(max(replicate * shard, _SAMPLES))  # each rank has one
    errors = []
    for case, norms in zip(cases, true, strict=True):
        with poisoned() if case is cases[-1] else contextlib.nullcontext():
            found = ours.accumulate(*(part[drawn % _SAMPLES] for part in case))
            total = ours.total()
        errors += [abs(n / norms[at % _SAMPLES] - 1) for at, n in found.items()]
        gradients = (
            gradient
            for sample, gradient in enumerate(reference_gradients(eager, *case, weights))
            for _ in range(np.count_nonzero(drawn % _SAMPLES == sample))
        )
        how = C * (1 - _SAFETY), group_names(privacy.clipping), privacy.clip_function
        errors.append(relative_error(total, reference_sum(gradients, *how)))
    return float(np.max(errors))


@torch.no_grad()
def fill_(model: nn.Module) -> None:
    """Fill parameters by their names alone, large enough for caps, sinks and windows to matter:
    scores and logits have a standard deviation of about 1, and nothing is 0."""
    std = model.model_args.dim**-0.5  # type: ignore[union-attr, operator]
    for name, parameter in model.named_parameters():
        whole = normal_of_name(name, parameter.shape)
        copy_slice_(parameter, 1 + 0.3 * whole if whole.dim() == 1 else std * whole)
