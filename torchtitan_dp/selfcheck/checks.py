"""All checks, in order: what is quick and explains the others first."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import get_args

import torch

from torchtitan_dp.distributed.attention import RotateMethod
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.selfcheck.attention import attention
from torchtitan_dp.selfcheck.checkpoints import checkpoint
from torchtitan_dp.selfcheck.estimates import norm_estimates
from torchtitan_dp.selfcheck.loss_head import loss_head
from torchtitan_dp.selfcheck.machine import devices, memory, one_key, same_versions
from torchtitan_dp.selfcheck.noise import noise
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.result import Check
from torchtitan_dp.selfcheck.sums import Loops, clipped_sum, updates
from torchtitan_dp.selfcheck.terms import Terms

_DO_NOT_TRAIN = "do not train here: epsilon would not hold"


def machine_checks(ranks: Ranks) -> list[Check]:
    """List what is checked of the machine, whatever is trained."""
    return [
        Check("devices", "the driver is too old for this torch, or broken: update it", devices),
        Check(
            "memory",
            "other programs hold it: end them, or choose other devices (CUDA_VISIBLE_DEVICES)",
            functools.partial(memory, ranks),
        ),
        Check(
            "versions",
            "install one environment on all nodes (scripts/setup.sh)",
            functools.partial(same_versions, ranks),
        ),
        Check(
            "root key",
            f"{_DO_NOT_TRAIN}; broadcasts between these ranks are wrong (NCCL, the network)",
            functools.partial(one_key, ranks),
        ),
    ]


def checks_of(
    ranks: Ranks, all_terms: Sequence[Terms], place: str, *, every: bool
) -> Iterator[Check]:
    """List what is checked on some terms, each statement once.

    Args:
        place: as of `checkpoints.checkpoint`.
        every: also what the terms do not ask for: all balancers and rotations of the ring, whole
            per-sample gradients (V1), secure noise, exact sums.
    """
    loops = Loops()
    for number, terms in enumerate(all_terms):
        before = [(one.dtype, one.degrees) for one in all_terms[:number]]
        if (terms.dtype, terms.degrees) not in before:  # these know no gradient method
            yield from _attention_checks(ranks, terms, every)
            if terms.config.training.loss_chunk_tokens:
                yield Check(
                    f"loss head, {terms.place}",
                    "training.loss_chunk_tokens = 0 trains without it",
                    functools.partial(loss_head, ranks, terms),
                )
            if terms.dtype == torch.float32:
                yield from _noise_checks(ranks, terms, every)
                yield Check(
                    f"checkpoint, {terms.place}",
                    f"checkpoints cannot be trusted where they were tried ({place}): another "
                    "job.dump_folder, on a file system that all nodes share",
                    functools.partial(checkpoint, ranks, terms, place),
                )
        yield from _sum_checks(ranks, terms, loops, every)


def _attention_checks(ranks: Ranks, terms: Terms, every: bool) -> Iterator[Check]:
    parallelism = terms.config.parallelism
    balancers = [parallelism.context_parallel_load_balancer]
    rotations = [parallelism.context_parallel_rotate_method]
    if terms.degrees[2] == 1:
        yield Check(
            f"attention, {terms.place}",
            f"{_DO_NOT_TRAIN}; another training.mixed_precision_param or torch may pass",
            functools.partial(attention, ranks, terms, balancers[0], rotations[0]),
        )
        return
    if every:
        balancers, rotations = ["headtail", None], list(get_args(RotateMethod))
    for balancer, rotate in itertools.product(balancers, rotations):
        yield Check(
            f"ring attention, {balancer}, {rotate}, {terms.place}",
            "another parallelism.context_parallel_load_balancer, context_parallel_rotate_method "
            "or torch may pass; else train with context_parallel_degree = 1",
            functools.partial(attention, ranks, terms, balancer, rotate),
        )


def _noise_checks(ranks: Ranks, terms: Terms, every: bool) -> Iterator[Check]:
    kinds = {"noise": terms}
    if every:
        kinds["secure noise"] = terms.but(secure_noise=True)
        kinds["noise of exact sums"] = terms.but(secure_noise=True, exact_sum=True)
    for kind, of in kinds.items():
        yield Check(f"{kind}, {terms.place}", _DO_NOT_TRAIN, functools.partial(noise, ranks, of))


def _sum_checks(ranks: Ranks, terms: Terms, loops: Loops, every: bool) -> Iterator[Check]:
    method: str = terms.config.privacy.gradient_method
    kind = method
    if METHODS[method].estimates_norms:
        yield Check(
            f"norm estimates, {terms.place}",
            f"{_DO_NOT_TRAIN}; privacy.gradient_method = 'ghost' has exact norms",
            functools.partial(norm_estimates, ranks, terms),
        )
        # The same but for the estimates, which the loop has not.
        kind, terms = f"{method} with exact norms", terms.but(gradient_method="ghost")
    kinds = {kind: terms}
    if every and method == "grad_sample":
        kinds["grad_sample, whole"] = terms.but(shard_grad_samples=False)
    if every and method == "ghost":
        kinds["ghost, two passes"] = terms.but(ghost_passes="two")
    if every and terms.dtype == torch.float32 and kind == method:
        kinds[f"{method}, exact"] = terms.but(secure_noise=True, exact_sum=True)
    for of_kind, of in kinds.items():
        yield Check(
            f"clipped sum, {of_kind}, {terms.place}",
            f"{_DO_NOT_TRAIN}; another privacy.gradient_method or dtype may pass; where ring "
            "attention does, look at reductions (NCCL, the network)",
            functools.partial(clipped_sum, ranks, of, loops),
        )
    if terms.dtype == torch.float32:
        yield Check(
            f"update, {kind}, {terms.place}",
            f"{_DO_NOT_TRAIN}; optimizer.implementation = 'for-loop' tells whether it is the "
            "fused AdamW",
            functools.partial(updates, ranks, terms, loops),
        )
