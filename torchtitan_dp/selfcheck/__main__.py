"""Check that this machine computes private steps right: the first thing to run on a new one.

    python -m torchtitan_dp.selfcheck [--config FILE [--section.key value …]] [--json FILE]
    torchrun --nproc_per_node N -m torchtitan_dp.selfcheck …

Alone or under torchrun, on the devices and the mesh of the training. Without `--config` it checks
every gradient method, on a mesh of all ranks as cp, and from 4 ranks on (an even number) also on
dp_shard 2 x cp; with it, what that file would use. It reads no record, and writes only `--json` and
a temporary checkpoint. Exit code 1 if a check fails, in one line each; 2 for a user's mistake.
"""

import dataclasses
import datetime
import itertools
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("selfcheck", __doc__)

# isort: split
import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU
from torchtitan_dp.base.process import die_with_parent, untested, versions
from torchtitan_dp.config.derived import METHODS
from torchtitan_dp.config.load import exit_on_mistake, write_json
from torchtitan_dp.distributed import devices
from torchtitan_dp.distributed.agreement import join_ranks, lost_ranks_as_faults
from torchtitan_dp.selfcheck import proof, steps
from torchtitan_dp.selfcheck.small import VARIANTS, Terms, default_terms, given_terms
from torchtitan_dp.selfcheck.steps import Measured, Ranks, worst

_DO_NOT_TRAIN = "do not train here: epsilon would not hold"
_COLLECTIVE_S = 60  # the time-out of a check's collectives
_AGREEMENT = datetime.timedelta(seconds=150)  # how long a rank waits for the others' measurements


@dataclass(frozen=True)
class Check:
    """A statement about this machine, what to do where it is wrong, and its measurement: of the
    ranks and `args`, collective over the world, with the same names on each rank."""

    name: str
    remedy: str
    measure: Callable[..., Measured]
    args: tuple[object, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One measurement over all ranks: its worst value on any of them."""

    name: str
    value: float  # NaN where a rank could not measure
    bound: float
    remedy: str
    error: str = ""  # why it could not

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # NaN is not

    def row(self) -> str:
        """Format it as a line of the table."""
        found = self.error or f"{self.value:9.3g}  <= {self.bound:.3g}"
        return f"  {'ok' if self.passed else 'FAILED':6}  {self.name:80}  {found}"

    def failure(self) -> str:
        """Return one line: what failed, and what to do."""
        found = self.error or f"{self.value:.3g} (the limit is {self.bound:.3g})"
        return f"FAILED: {self.name}: {found}; {self.remedy}"


def main(argv: list[str]) -> None:
    options, overrides = parsed("selfcheck", __doc__, argv)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with exit_on_mistake():
        devices.require_usable_devices()
        terms = given_terms(overrides, world_size) if overrides else default_terms(world_size)
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
    os.umask(0o077)
    device = join_ranks(options.backend, _COLLECTIVE_S)
    ranks = Ranks(device, dist.new_group(backend="gloo", timeout=_AGREEMENT))
    folder = os.path.abspath(terms[0].config.job.dump_folder)
    while not os.path.isdir(folder):  # the nearest that exists, where the run's will lie
        folder = os.path.dirname(folder)
    name, found = devices.device_name(device), facts(device)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, file=sys.stderr, flush=True)

    say(f"selfcheck: {world_size} x {name}")
    for fact, value in found.items():
        say(f"  {fact}: {value}")
    for line in untested():
        say(line)
    checks = checks_of(terms, folder, every=not overrides)
    outcomes = run(ranks, checks, lambda outcome: say(outcome.row()))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        say(outcome.failure())
    if options.json and dist.get_rank() == 0:
        write_json(options.json, for_programs(name, found, outcomes))
    say(f"selfcheck: {len(outcomes) - len(failed)} of {len(outcomes)} passed")
    if failed:
        raise SystemExit(1)  # some rank may still be in a collective: do not wait for it
    dist.destroy_process_group()


def run(
    ranks: Ranks, checks: Iterable[Check], report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run each check, `report` each outcome on all ranks, and return all. A check that raises has
    failed; with several ranks, some may still be in one of its collectives: it is the last.
    Collective over the world."""
    outcomes: list[Outcome] = []
    for check in checks:
        mine: Measured | str
        try:
            mine = check.measure(ranks, *check.args)
        except (Exception, SystemExit) as error:  # a `Fault` is a SystemExit
            mine = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            line = f"selfcheck: rank {dist.get_rank()}: {check.name}: {mine}"
            print(line, file=sys.stderr, flush=True)  # the others may hang, and end this process
        with lost_ranks_as_faults():
            found = ranks.gather(mine)
        for outcome in merged(check, found):
            outcomes.append(outcome)
            report(outcome)
        if len(found) > 1 and any(isinstance(one, str) for one in found):
            break
    return outcomes


def merged(check: Check, ranks: Sequence[Measured | str]) -> list[Outcome]:
    """Return outcomes with the worst value of any rank; a string is a rank's error."""
    found: list[Measured] = []
    for rank, one in enumerate(ranks):
        if isinstance(one, str):
            return [Outcome(check.name, math.nan, math.nan, check.remedy, f"rank {rank}: {one}")]
        found.append(one)
    assert len({frozenset(one) for one in found}) == 1, "ranks measured other things"
    outcomes = []
    for what in found[0]:
        values, bounds = zip(*(one[what] for one in found), strict=True)
        outcomes.append(Outcome(f"{check.name}: {what}", worst(values), min(bounds), check.remedy))
    return outcomes


def facts(device: torch.device) -> dict[str, str]:
    """Collect the facts about the machine for a bug report, in the order of the table."""
    if device.type == "cuda":
        free, _ = devices.memory_bytes(device)
    else:
        free = (devices.available_bytes() or 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    known = {name: version for name, version in versions().items() if version != "unknown"}
    found = {"free memory": f"{free / 2**30:.1f} GiB a rank"} | devices.libraries(device) | known
    return found | {"python": platform.python_version(), "host": platform.platform()}


def for_programs(device: str, facts: dict[str, str], outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the content of `--json`; JSON has no NaN."""
    checks = []
    for one in outcomes:
        value = one.value if math.isfinite(one.value) else None
        bound = None if one.error else one.bound
        checks.append({"name": one.name, "passed": one.passed, "value": value, "bound": bound})
    passed = all(outcome.passed for outcome in outcomes)
    return {"device": device, "facts": facts, "passed": passed, "checks": checks}


def checks_of(all_terms: Sequence[Terms], folder: str, *, every: bool) -> Iterator[Check]:
    """List the checks on some terms, each statement once; `every` adds what the terms do not ask
    for: all balancers and rotations of the ring, variants of a method, secure noise."""
    network = f"{_DO_NOT_TRAIN}; broadcasts between these ranks are wrong (NCCL, the network)"
    yield Check("root key", network, steps.root_key)
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
    other = "parallelism.context_parallel_degree" if ring else "training.mixed_precision_param"
    remedy = f"{_DO_NOT_TRAIN}; another {other} or torch may pass"
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
    remedy = f"another job.dump_folder than in {folder}, on a file system that all nodes share"
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
    remedy = f"{_DO_NOT_TRAIN}; another privacy.gradient_method or dtype may pass, or network"
    for of_kind, of in kinds.items():
        yield Check(f"clipped sum, {of_kind}", remedy, steps.clipped_sum, (of,))
    if terms.dtype == torch.float32:
        name = f"a tiny {terms.args.settings['model_type']}"
        yield Check(name, proof.REMEDY, steps.model_proof, (terms,))
        remedy = f"{_DO_NOT_TRAIN}; optimizer.implementation = 'for-loop' may pass"
        yield Check(f"update, {kind}", remedy, steps.updates, (terms,))


if __name__ == "__main__":
    main(sys.argv[1:])
