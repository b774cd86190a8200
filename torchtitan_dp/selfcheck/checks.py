"""All checks, in order: those that are quick and explain others come first."""

import functools
import hashlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import torch

from torchtitan_dp.distributed.agreement import shared_root_key
from torchtitan_dp.distributed.attention import RotateMethod
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.distributed.devices import cuda_devices, memory_bytes
from torchtitan_dp.distributed.host_memory import available_bytes
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger import versions
from torchtitan_dp.selfcheck.parts import attention, feed_forward, loss_head, noise, norm_estimates
from torchtitan_dp.selfcheck.run import Check, Measured, Ranks
from torchtitan_dp.selfcheck.small import Terms
from torchtitan_dp.selfcheck.steps import Loops, checkpoint, clipped_sum, updates

_Measure = Callable[..., Sequence[Measured]]
_DO_NOT_TRAIN = "do not train here: epsilon would not hold"
_GIB = 2**30


def machine_checks(ranks: Ranks) -> list[Check]:
    """List the checks of the machine, which do not depend on what is trained."""
    update = "the driver is too old for this torch, or broken: update it"
    free = "other programs hold it: end them, or choose other devices (CUDA_VISIBLE_DEVICES)"
    install = "install one environment on all nodes (scripts/setup.sh)"
    network = f"{_DO_NOT_TRAIN}; broadcasts between these ranks are wrong (NCCL, the network)"
    return [
        Check("devices", update, _devices),
        Check("memory", free, functools.partial(_memory, ranks)),
        Check("versions", install, functools.partial(_same_versions, ranks)),
        Check("root key", network, functools.partial(_one_key, ranks)),
    ]


def _devices() -> Sequence[Measured]:
    """Count the CUDA devices that cannot be used: the run would be on the CPU."""
    unusable = 0 if has_accelerator() else cuda_devices()
    return (Measured("present but unusable", unusable, 0),)


def _memory(ranks: Ranks) -> Sequence[Measured]:
    free, needed = free_memory_gib(ranks.device)
    return (Measured("missing GiB", max(needed - free, 0.0), 0.0),)


def _same_versions(ranks: Ranks) -> Sequence[Measured]:
    found = ranks.gather((versions(), torch.__version__, platform.python_version()))
    return (Measured("ranks that differ", sum(one != found[0] for one in found), 0),)


def _one_key(ranks: Ranks) -> Sequence[Measured]:
    """Compare the ranks' root keys, drawn and broadcast as for a run.

    The key serves no other purpose, and only the hash of a key derived from it is compared.
    """
    derived = shared_root_key(ranks.device, None).stream("coin").take(1)
    found = ranks.gather(hashlib.sha256(derived).hexdigest())
    return (Measured("ranks that differ", sum(one != found[0] for one in found), 0),)


def free_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return how much memory is free to a rank, and how much should be: of its device, or host."""
    if device.type == "cuda":
        free, total = memory_bytes(device)
        return free / _GIB, 0.9 * total / _GIB  # a CUDA context takes a few percent
    available = available_bytes()
    assert available is not None, "Linux has /proc/meminfo"
    return available / _GIB / int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1.0  # these checks' own


def checks_of(
    ranks: Ranks, all_terms: Sequence[Terms], place: str, *, every: bool
) -> Iterator[Check]:
    """List the checks on some terms, each statement once.

    Args:
        place: a folder that all ranks see, for a temporary checkpoint.
        every: also those that the terms do not ask for: all balancers and rotations of the ring, a
            loss in chunks, whole per-sample gradients (V1), secure noise, exact sums.
    """
    loops = Loops()
    met = set()
    for terms in all_terms:
        if (terms.dtype, terms.degrees) not in met:  # these depend on no gradient method
            met.add((terms.dtype, terms.degrees))
            yield from _attention_checks(ranks, terms, every)
            if every or terms.in_tiles:
                remedy = "training.feed_forward_chunk = 0 trains without it"
                yield _check(ranks, terms, "feed-forward in tiles", remedy, feed_forward)
            if every or terms.config.training.loss_chunk_tokens:
                remedy = "training.loss_chunk_tokens = 0 trains without it"
                yield _check(ranks, terms, "loss head", remedy, loss_head)
            if terms.dtype == torch.float32:
                kinds = {"noise": terms}
                if every:
                    kinds["secure noise"] = terms.but(secure_noise=True)
                for kind, of in kinds.items():
                    yield _check(ranks, of, kind, _DO_NOT_TRAIN, noise)
                remedy = (
                    f"checkpoints cannot be trusted where they were tried ({place}): another "
                    "job.dump_folder, on a file system that all nodes share"
                )
                yield _check(ranks, terms, "checkpoint", remedy, checkpoint, place)
        yield from _sum_checks(ranks, terms, loops, every)


def _check(
    ranks: Ranks, terms: Terms, name: str, remedy: str, measure: _Measure, *arguments: object
) -> Check:
    bound = functools.partial(measure, ranks, terms, *arguments)
    return Check(f"{name}, {terms.place}", remedy, bound)


def _attention_checks(ranks: Ranks, terms: Terms, every: bool) -> Iterator[Check]:
    parallelism = terms.config.parallelism
    balancers = [parallelism.context_parallel_load_balancer]
    rotations = [parallelism.context_parallel_rotate_method]
    if terms.degrees[2] == 1:
        remedy = f"{_DO_NOT_TRAIN}; another training.mixed_precision_param or torch may pass"
        yield _check(ranks, terms, "attention", remedy, attention, balancers[0], rotations[0])
        if every or terms.heads_apart:
            name = "attention, heads apart"
            yield _check(ranks, terms, name, remedy, attention, None, rotations[0], True)
        return
    if every:
        balancers, rotations = ["headtail", None], list(get_args(RotateMethod))
    remedy = (
        "another parallelism.context_parallel_load_balancer, context_parallel_rotate_method or "
        "torch may pass; else train with context_parallel_degree = 1"
    )
    for balancer, rotate in itertools.product(balancers, rotations):
        name = f"ring attention, {balancer}, {rotate}"
        yield _check(ranks, terms, name, remedy, attention, balancer, rotate)
    if every or terms.heads_apart:
        name = f"ring attention, {balancers[0]}, {rotations[0]}, heads apart"
        yield _check(ranks, terms, name, remedy, attention, balancers[0], rotations[0], True)


def _sum_checks(ranks: Ranks, terms: Terms, loops: Loops, every: bool) -> Iterator[Check]:
    method: str = terms.config.privacy.gradient_method
    kind = method
    if METHODS[method].estimates_norms:
        remedy = f"{_DO_NOT_TRAIN}; privacy.gradient_method = 'ghost' has exact norms"
        yield _check(ranks, terms, "norm estimates", remedy, norm_estimates)
        # The loop's norms are exact: the rest of the method is compared with it.
        kind, terms = f"{method} with exact norms", terms.but(gradient_method="ghost")
    kinds = {kind: terms}
    if every and method == "microbatch":
        kinds["microbatch, feed-forward in tiles"] = terms.with_tiles()
    if every and method == "grad_sample":
        kinds["grad_sample, whole"] = terms.but(shard_grad_samples=False)
    if every and method == "ghost":
        kinds["ghost, two passes"] = terms.but(ghost_passes="two")
    remedy = (
        f"{_DO_NOT_TRAIN}; another privacy.gradient_method or dtype may pass; where ring attention "
        "does, look at reductions (NCCL, the network)"
    )
    for of_kind, of in kinds.items():
        yield _check(ranks, of, f"clipped sum, {of_kind}", remedy, clipped_sum, loops)
    if terms.dtype == torch.float32:
        remedy = (
            f"{_DO_NOT_TRAIN}; if it passes with optimizer.implementation = 'for-loop', the fused "
            "optimizer is at fault"
        )
        yield _check(ranks, terms, f"update, {kind}", remedy, updates, loops)
