"""The plan of a run: its epsilon, samples, noise, cost and memory, before anything is started.

    python -m torchtitan_dp.plan --job.config_file FILE [--section.key value …] [--world_size N]
                                 [--ranks_here R] [--memory_gib G] [--json FILE] [--recommend]
                                 [--machine M [--choose]]

Checks everything that one process can check: `run_train.sh` runs it first. A user's mistake is one
line and exit code 2. A prediction of memory (`memory`) takes longer, and is made with
`--memory_gib` (then a run that does not fit is a mistake too), or `--json`. `--ranks_here`, which
each start gives, compares the memory of hosts with this machine's. `--recommend` compares batches
and steps (`signal`); `--machine` predicts seconds (`roofline`), and `--choose` the fastest mesh,
checkpointing and method that fit (`choose`).
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("plan", __doc__)

# isort: split
import torch

from torchtitan_dp.base.process import VERBOSE, lock_folder, progress, typed
from torchtitan_dp.checkpoint.plan import Plan, after_crash
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    METHODS,
    feed_forward_chunk,
    heldout_units,
    mesh_degrees,
    unit_word,
)
from torchtitan_dp.config.load import (
    exit_on_mistake,
    load_config,
    results,
    seeks_fewest_ranks,
    write_json,
)
from torchtitan_dp.distributed.devices import available_bytes, cuda_devices, memory_bytes
from torchtitan_dp.ledger.spending import explain, heldout_epsilon, inherited, reasons, spent
from torchtitan_dp.models.hugging_face import (
    describe,
    origin,
    parameter_count,
    skeleton,
    trained_count,
)
from torchtitan_dp.plan.choose import choose, fewest_ranks, show_choices
from torchtitan_dp.plan.memory import DEFAULT_GIB, GIB, predict, show_memory
from torchtitan_dp.plan.roofline import (
    MACHINES,
    RANKS_A_NODE,
    Machine,
    StepCost,
    step_cost,
    step_seconds,
)
from torchtitan_dp.plan.signal import DROWNS, recommend, refuse
from torchtitan_dp.privacy.meaning import templates
from torchtitan_dp.privacy.published_loss import HIDES
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.train.check import (
    Checked,
    check_run,
    host_memory,
    is_done,
    notices,
    refuse_lack,
    show_records,
    tokenizer_lines,
)

_TEXT = templates(Path(__file__).parent).get_template("plan.txt.j2")


class Loss(NamedTuple):
    """The held-out loss that a run publishes at its end."""

    units: int
    deviation: float  # of its noise, in nats
    epsilon: float  # with those that crashes interrupted


@dataclass(frozen=True)
class Spending:
    """The spending, noise and cost of a run with privacy."""

    plan: Plan
    trained: int  # parameters
    noise: tuple[float, float]  # its norm over C, in a step and averaged over the run
    kept_noise_gib: float  # of a rank: earlier steps', where noise is correlated
    cost: StepCost
    meaning: list[str]  # of epsilon, for one person: sentences
    inherited: float | None  # epsilon of the initial weights alone
    if_capped: float | None  # epsilon, were estimated norms capped; None where they are
    loss: Loss | None  # None where none is published


def main(argv: list[str]) -> list[str]:
    """Plan; return what it has found of the configuration, for the command line of a start."""
    options, overrides = parsed("plan", __doc__, argv)
    with exit_on_mistake():
        world_size, machine = world_size_of(options), machine_of(options)
        memory_gib = options.memory_gib or (machine.memory_gib if machine else DEFAULT_GIB)
        config = load_config(overrides, world_size)
        if options.recommend:
            refuse(config)
        asked = options.memory_gib is not None or options.json
        predicts = asked and not options.no_memory and not options.choose
        found = []
        if (predicts or options.ranks_here or machine) and not options.choose:
            found = ranks_a_sample(config, overrides, world_size, memory_gib, options.ranks_here)
        overrides = [*overrides, *found]
        config = load_config(overrides, world_size)
        # Before records are indexed; a plan alone may be for another machine.
        available = available_bytes() if options.ranks_here else None
        progress("reading records, finding the noise…")
        if os.path.isdir(folder := config.job.dump_folder):
            lock_folder(folder).close()  # before its ledger is read: a live run lengthens that
        checked = check_run(config, units=options.units)
        if options.ranks_here is not None:
            lock_folder(folder).close()  # a plan alone makes no folder
            refuse_lack(config, checked.args, options.ranks_here, available)
        spending = None if checked.plan is None else _spending(config, checked, checked.plan)
    starts = options.ranks_here is not None
    brief = (starts or options.recommend) and not os.environ.get(VERBOSE)
    out = sys.stderr if starts else results(options.json)
    for key in [] if brief else found:
        print(f"      {key}: the fewest ranks that fit share a sample", file=out)
    host = _host(config, checked, options.ranks_here or min(world_size, RANKS_A_NODE))
    _show(config, checked, spending, host, available, out, brief=brief)
    if starts and is_done(config, checked):
        raise SystemExit(0)
    if spending is None:
        if machine or asked:
            print("      nothing more is predicted without privacy", file=out)
        return found
    plan, args = spending.plan, checked.args
    content = {
        "epsilon": plan.epsilon if plan.private else None,
        "epsilon_stated": plan.epsilon_stated if plan.private else None,
        "private": plan.private,
        **plan.settings.fields(),
        "steps": plan.steps,
        "parameters": parameter_count(args),
        "trained_parameters": spending.trained,
        "world_size": world_size,
        **dataclasses.asdict(spending.cost),
        "host_memory": host,
        "signal": {
            "noise_in_step": spending.noise[0],
            "noise_over_run": spending.noise[1],
            "drowns": spending.noise[1] > DROWNS,
        },
        "recommendation": None,
        "choices": [],
    }
    with exit_on_mistake():
        if options.recommend:
            content["recommendation"] = recommend(config, plan, args, out)
        if config.privacy.noise == "banded" and config.privacy.bands == "auto":
            overrides = [*overrides, f"--privacy.bands={plan.settings.mechanism.period}"]
        if options.choose and machine:
            settings, steps = plan.settings, plan.steps
            drawn = settings.implied_units, settings.mechanism.sample_rate
            choices = choose(overrides, world_size, machine, memory_gib, *drawn)
            show_choices(choices, steps, machine, out)
            content |= choices[0].step.for_programs(steps)
            content["choices"] = [choice.for_programs(steps) for choice in choices]
        elif machine:
            seconds = step_seconds(config, args, machine, spending.cost.microbatches_per_step)
            print(
                f"      predicted for {machine.name}: {seconds.microbatch:.3g} s a microbatch, "
                f"{seconds.total:.3g} s a step, {seconds.hours(plan.steps):.3g} h in all; most of "
                f"it: {seconds.limit} ({machine.limits()})",
                file=out,
            )
            content |= seconds.for_programs(plan.steps)
    progress("predicting memory…" if predicts else "")
    memory = predict(overrides, world_size, memory_gib) if predicts else None
    progress("")
    if memory is not None:
        content |= memory.for_programs()
    if options.json:
        write_json(options.json, content)
    if memory is not None:
        with exit_on_mistake():
            show_memory(memory, config, out, limited=options.memory_gib is not None)
    return found


def world_size_of(options: argparse.Namespace) -> int:
    """Return the number of processes, the options checked; ValueError, one line."""
    value = options.memory_gib
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"--memory_gib = {value}: must be a positive number of GiB")
    given = options.world_size
    text = os.environ.get("NGPU", "1") if given is None else str(given)
    if not (text.isdecimal() and int(text) >= 1):
        name = "NGPU" if given is None else "--world_size"
        raise ValueError(f"{name} = '{text}': must be a number of processes, 1 or more")
    if options.units is not None and options.units < 1:
        raise ValueError(f"--units = {options.units}: must be 1 or more")
    if options.ranks_here is not None and not 1 <= options.ranks_here <= int(text):
        raise ValueError(f"--ranks_here = {options.ranks_here}: must be 1 to {text}, all ranks")
    return int(text)


def machine_of(options: argparse.Namespace) -> Machine | None:
    """Return the machine that the options name, if any; ValueError, one line."""
    known = ", ".join(MACHINES)
    if options.choose and options.machine is None:
        raise ValueError(f"--choose: needs --machine, one of {known}")
    if options.machine is not None and options.machine not in MACHINES:
        raise ValueError(f"--machine = '{options.machine}': it is none of {known}")
    return MACHINES.get(options.machine)


def ranks_a_sample(
    config: JobConfig,
    overrides: list[str],
    world_size: int,
    memory_gib: float,
    ranks_here: int | None,
) -> list[str]:
    """Choose `parallelism.context_parallel_degree = "auto"`, by this machine's memory where the run
    starts here; warn, and leave it to all ranks, where nothing can be predicted. ValueError, one
    line, if the setting is refused."""
    # How much noise is kept, and so the memory, is not known before the bands.
    waits = config.privacy.noise == "banded" and config.privacy.bands == "auto"
    if world_size == 1 or not config.privacy.enable or waits or not seeks_fewest_ranks(overrides):
        return []
    progress("predicting memory…")
    try:
        gib = memory_here_gib(ranks_here) if ranks_here else memory_gib
        return fewest_ranks(overrides, world_size, gib)
    except ValueError:
        raise
    except Exception as error:  # a run may work where its prediction does not
        print(
            "warning: parallelism.context_parallel_degree = 'auto': no memory could be predicted "
            f"({error!r}), so all ranks that are left share a sample; give their number",
            file=sys.stderr,
        )
        return []


def memory_here_gib(ranks: int) -> float:
    """Return the memory of a device of this machine, or of a rank where it has none."""
    if cuda_devices() == 0:
        return (available_bytes() or DEFAULT_GIB * GIB) / ranks / GIB
    alone = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))  # it opens a CUDA context
    with alone:
        return alone.submit(memory_bytes, torch.device("cuda")).result()[1] / GIB


def _spending(config: JobConfig, checked: Checked, plan: Plan) -> Spending:
    args, settings, ledger = checked.args, plan.settings, plan.ledger
    count, batch = settings.implied_units, settings.expected_batch_size
    mechanism, trained = settings.mechanism, trained_count(args)
    before = inherited(ledger.ancestors)
    if_capped, stated = None, plan.epsilon_stated  # with lost steps, as a release states it
    meaning = explain(ledger, spent(ledger, ledger.left), stated)
    if mechanism.largest_share > 1:
        exact = Mechanism(mechanism.noise_multiplier, mechanism.sample_rate)
        if_capped = dataclasses.replace(settings, mechanism=exact).epsilon(plan.steps)
    _, dp_shard, cp = mesh_degrees(config)
    return Spending(
        plan=plan,
        trained=trained,
        noise=mechanism.noise_norms(trained, batch, plan.steps),
        kept_noise_gib=4 * (mechanism.period - 1) * trained / (dp_shard * cp) / GIB,
        cost=step_cost(config, args, records=count, rate=mechanism.sample_rate),
        inherited=settings.compose(list(before)) if before else None,
        meaning=meaning.sentences(settings.unit, stated, settings.delta) if meaning else [],
        if_capped=if_capped,
        loss=_loss(config, plan, len(checked.records.heldout)),
    )


def _loss(config: JobConfig, plan: Plan, heldout: int) -> Loss | None:
    loss, spends = plan.ledger.heldout_loss, heldout_epsilon(plan.ledger)
    if loss is None or spends is None:
        return None
    replicate, shard, _ = mesh_degrees(config)
    at_once = replicate * shard * config.training.local_batch_size
    units = heldout_units(heldout, config.validation.steps, at_once)
    return Loss(units, loss.noise_multiplier * loss.clip / units, spends)


def _host(config: JobConfig, checked: Checked, ranks: int) -> dict[str, float]:
    """Predict the host's memory of a rank, and of so many ranks of a node, in GiB."""
    memory = host_memory(config, checked.args)
    return {
        "inputs_gib": memory.inputs / GIB,
        "save_gib": memory.copy / GIB,
        "node_gib": ranks * sum(memory) / GIB,
        "node_ranks": ranks,
    }


def _show(
    config: JobConfig,
    checked: Checked,
    spending: Spending | None,
    host: dict[str, float],
    available: int | None,
    out: TextIO,
    *,
    brief: bool,
) -> None:
    progress("")
    show_records(config, checked, brief=brief)
    text = _TEXT.render(
        **vars(checked),
        brief=brief,
        config=config,
        parameters=parameter_count(checked.args),
        origin=origin(config),
        spent=spending,
        host=host,
        left=available and available / GIB,
        drowns=DROWNS,
        hides=HIDES,
        reasons=reasons,
        after_crash=after_crash,
        command=typed(f"plan {config.job.config_file}"),
        unit=unit_word(config),
        method=METHODS[config.privacy.gradient_method],
        tile=feed_forward_chunk(config) if skeleton(checked.args).gated else 0,
        tokenizer=[
            line
            for line in tokenizer_lines(config, checked.records.source)
            if not brief or line.startswith("warning")
        ],
        notices=notices(config),
        model=describe(config, checked.args),
    )
    print(text, end="", file=out)


if __name__ == "__main__":
    chosen_keys = main(sys.argv[1:])
    if "--ranks_here" in sys.argv:  # for the script that starts the run
        print(*chosen_keys, sep="\n")
