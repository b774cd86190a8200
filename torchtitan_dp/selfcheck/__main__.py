"""Check that this machine computes private steps right: the first thing to run on a new one.

    python -m torchtitan_dp.selfcheck [--config FILE [--section.key value …]] [--json FILE]
    torchrun --nproc_per_node N -m torchtitan_dp.selfcheck …

Alone or under torchrun, on the devices and the mesh of the training. Without `--config` it checks
every gradient method, on a mesh of all ranks as cp, and from 4 ranks on (an even number) also on
dp_shard 2 x cp; with it, what that file would use. It reads no record, and writes only `--json` and
a temporary checkpoint. Exit code 1 if a check fails, in one line each; 2 for a user's mistake.
"""

import dataclasses
import hashlib
import itertools
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("selfcheck", __doc__)

# isort: split
import torch
import torch.distributed as dist

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import exit_on_mistake, write_json
from torchtitan_dp.distributed import devices
from torchtitan_dp.distributed.agreement import shared_root_key
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.distributed.host_memory import available_bytes
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.process import die_with_parent, untested, versions
from torchtitan_dp.selfcheck import proof, steps
from torchtitan_dp.selfcheck.run import Check, Measured, Outcome, Ranks, run, start
from torchtitan_dp.selfcheck.small import VARIANTS, Terms, default_terms, given_terms

_DO_NOT_TRAIN = "do not train here: epsilon would not hold"
_GIB = 2**30


def main(argv: list[str]) -> None:
    options, overrides = parsed("selfcheck", __doc__, argv)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with exit_on_mistake():
        terms = given_terms(overrides, world_size) if overrides else default_terms(world_size)
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
    os.umask(0o077)
    ranks = start(options.backend)
    nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    folder = checkpoint_folder(terms[0].config if overrides else None, nodes)
    device, found = devices.device_name(ranks.device), facts(ranks.device)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, file=sys.stderr, flush=True)

    say(f"selfcheck: {world_size} x {device}")
    for name, value in found.items():
        say(f"  {name}: {value}")
    for line in untested():
        say(line)
    checks = [*machine_checks(), *checks_of(terms, folder, every=not overrides)]
    outcomes = run(ranks, checks, lambda outcome: say(outcome.row()))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        say(outcome.failure())
    if options.json and dist.get_rank() == 0:
        write_json(options.json, for_programs(device, found, outcomes))
    say(f"selfcheck: {len(outcomes) - len(failed)} of {len(outcomes)} passed")
    if failed:
        raise SystemExit(1)  # some rank may still be in a collective: do not wait for it
    dist.destroy_process_group()


def checkpoint_folder(config: JobConfig | None, nodes: int) -> str:
    """Return the folder to try checkpoints in: where the run's will lie, if that is known; else a
    temporary one, or the working folder, which several machines share."""
    if config is None:
        return os.getcwd() if nodes > 1 else tempfile.gettempdir()
    folder = os.path.abspath(config.job.dump_folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def facts(device: torch.device) -> dict[str, str]:
    """Collect the facts about the machine for a bug report, in the order of the table."""
    free = {"free memory": f"{memory_gib(device)[0]:.1f} GiB a rank"}
    known = {name: version for name, version in versions().items() if version != "unknown"}
    found = free | devices.libraries(device) | known
    return found | {"python": platform.python_version(), "host": platform.platform()}


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return how much memory is free to a rank, of its device or host, and how much is missing."""
    if device.type == "cuda":
        free, total = devices.memory_bytes(device)
        return free / _GIB, max(0.9 * total - free, 0) / _GIB  # a CUDA context takes a few percent
    available = available_bytes()
    assert available is not None, "Linux has /proc/meminfo"
    gib = available / _GIB / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return gib, max(1 - gib, 0)  # these checks need one


def for_programs(device: str, facts: dict[str, str], outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the content of `--json`; JSON has no NaN."""
    checks = []
    for one in outcomes:
        value = one.value if math.isfinite(one.value) else None
        bound = None if one.error else one.bound
        checks.append({"name": one.name, "passed": one.passed, "value": value, "bound": bound})
    passed = all(outcome.passed for outcome in outcomes)
    return {"device": device, "facts": facts, "passed": passed, "checks": checks}


def machine_checks() -> list[Check]:
    """List the checks of the machine, which are quick and explain others: they come first."""

    def root_key(ranks: Ranks) -> Measured:
        """Draw and broadcast one as for a run; compare a hash of a key derived from it."""
        key = shared_root_key(ranks.device, None).stream("coin").take(1)
        return {"ranks that differ": (ranks.differing(hashlib.sha256(key).digest()), 0)}

    unusable = 0 if has_accelerator() else devices.cuda_devices()  # the run would be on the CPU
    environment = versions(), torch.__version__, platform.python_version()
    update = "the driver is too old for this torch, or broken: update it"
    free = "other programs hold it: end them, or choose other devices (CUDA_VISIBLE_DEVICES)"
    install = "install one environment on all nodes (scripts/setup.sh)"
    network = f"{_DO_NOT_TRAIN}; broadcasts between these ranks are wrong (NCCL, the network)"
    return [
        Check("devices", update, lambda ranks: {"present but unusable": (unusable, 0)}),
        Check("memory", free, lambda ranks: {"missing GiB": (memory_gib(ranks.device)[1], 0)}),
        Check("versions", install, lambda r: {"ranks that differ": (r.differing(environment), 0)}),
        Check("root key", network, root_key),
    ]


def checks_of(all_terms: Sequence[Terms], folder: str, *, every: bool) -> Iterator[Check]:
    """List the checks on some terms, each statement once; `every` adds what the terms do not ask
    for: all balancers and rotations of the ring, variants of a method, secure noise."""
    met = set()
    for terms in all_terms:
        checks = [_of_sums(terms, every)]
        if (terms.dtype, terms.degrees) not in met:  # these depend on no gradient method
            checks = [_of_attention(terms, every), _of_noise(terms, folder, every), *checks]
        met.add((terms.dtype, terms.degrees))
        for check in itertools.chain(*checks):
            yield dataclasses.replace(check, name=f"{check.name}, {terms.label}")


def _of_attention(terms: Terms, every: bool) -> Iterator[Check]:
    parallelism, ring = terms.config.parallelism, terms.degrees[2] > 1
    balancers = [parallelism.context_parallel_load_balancer]
    rotations = [parallelism.context_parallel_rotate_method]
    remedy = f"{_DO_NOT_TRAIN}; another training.mixed_precision_param or torch may pass"
    if ring:
        remedy = (
            "another parallelism.context_parallel_load_balancer, context_parallel_rotate_method or "
            "torch may pass; else train with context_parallel_degree = 1"
        )
    if ring and every:
        balancers, rotations = ["headtail", None], ["allgather", "alltoall"]
    cases = [(*pair, False) for pair in itertools.product(balancers, rotations)]
    if every or terms.heads_apart:
        cases.append((balancers[0], rotations[0], True))
    for balancer, rotate, apart in cases:
        name = f"ring attention, {balancer}, {rotate}" if ring else "attention"
        name = f"{name}, heads apart" if apart else name
        yield Check(name, remedy, steps.attention, (terms, balancer, rotate, apart))


def _of_noise(terms: Terms, folder: str, every: bool) -> Iterator[Check]:
    if terms.dtype != torch.float32:
        return
    yield Check("noise", _DO_NOT_TRAIN, steps.noise, (terms,))
    if every:
        yield Check("secure noise", _DO_NOT_TRAIN, steps.noise, (terms.but(secure_noise=True),))
    remedy = (
        f"checkpoints cannot be trusted where they were tried ({folder}): another "
        "job.dump_folder, on a file system that all nodes share"
    )
    yield Check("checkpoint", remedy, steps.checkpoint, (terms, folder))


def _of_sums(terms: Terms, every: bool) -> Iterator[Check]:
    method: str = terms.config.privacy.gradient_method
    kind = method
    if METHODS[method].estimates_norms:
        remedy = f"{_DO_NOT_TRAIN}; privacy.gradient_method = 'ghost' has exact norms"
        yield Check("norm estimates", remedy, steps.norm_estimates, (terms,))
        # The loop's norms are exact: the rest of the method is compared with it.
        kind, terms = f"{method} with exact norms", terms.but(gradient_method="ghost")
    kinds, variants = {kind: terms}, VARIANTS.get(method, {}) if every else {}
    kinds |= {f"{method}, {name}": terms.but(**of) for name, of in variants.items()}
    remedy = (
        f"{_DO_NOT_TRAIN}; another privacy.gradient_method or dtype may pass; where ring attention "
        "does, look at reductions (NCCL, the network)"
    )
    for of_kind, of in kinds.items():
        yield Check(f"clipped sum, {of_kind}", remedy, steps.clipped_sum, (of,))
    if terms.dtype == torch.float32:
        name = f"a tiny {terms.args.settings['model_type']}"
        yield Check(name, proof.REMEDY, proof.gradients, (terms,))
        remedy = (
            f"{_DO_NOT_TRAIN}; if it passes with optimizer.implementation = 'for-loop', the fused "
            "optimizer is at fault"
        )
        yield Check(f"update, {kind}", remedy, steps.updates, (terms,))


if __name__ == "__main__":
    main(sys.argv[1:])
