"""The plan's report: computed once, and shown as text for people and as JSON for programs."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_dp.base.process import lock_folder, typed
from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import feed_forward_chunk, heldout_units, mesh_degrees, unit_word
from torchtitan_dp.distributed.host_memory import available_bytes
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger.schema import explain
from torchtitan_dp.ledger.spending import heldout_epsilon, spent
from torchtitan_dp.ledger.templates import templates
from torchtitan_dp.models.hugging_face import describe, parameter_count, skeleton, trained_count
from torchtitan_dp.plan.memory import GIB
from torchtitan_dp.plan.roofline import RANKS_A_NODE, StepCost, step_cost
from torchtitan_dp.plan.signal import DROWNS, Noise, noise_of_run
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.train.check import Checked, check_run, notices, show_records, tokenizer_lines
from torchtitan_dp.train.machine import host_memory, refuse_lack

_TEXT = templates(Path(__file__).parent).get_template("plan.txt.j2")


class Loss(NamedTuple):
    """The held-out loss that a run publishes at its end."""

    units: int
    deviation: float  # of its noise, in nats
    epsilon: float  # with those that crashes interrupted


@dataclass(frozen=True)
class Spent:
    """The spending, noise and cost of a run with privacy."""

    plan: Plan
    trained: int  # parameters
    noise: Noise
    kept_noise_gib: float  # of a rank: earlier steps', where noise is correlated
    cost: StepCost
    meaning: tuple[str, ...]  # of epsilon, for one person: sentences
    if_capped: float | None  # epsilon, were estimated norms capped; None where they are
    loss: Loss | None  # None where none is published


@dataclass(frozen=True)
class Report:
    """All of a plan but a GPU's memory, which takes longer to predict."""

    config: JobConfig
    world_size: int
    checked: Checked
    host: dict[str, float]  # GiB of a rank and a node; ranks of a node
    available: int | None  # bytes that this machine has left
    spent: Spent | None  # None without privacy


def make_report(
    config: JobConfig, world_size: int, *, ranks_here: int | None = None, units: int | None = None
) -> Report:
    """Check a run, and compute what it will spend, by the plan's options; ValueError, one line.

    This machine must have the memory of `ranks_here`.
    """
    available = available_bytes()  # before records are indexed
    checked = check_run(config, units=units)
    lock_folder(config.job.dump_folder).close()
    if ranks_here is not None:
        refuse_lack(config, checked.args, ranks_here, available)
    memory = host_memory(config, checked.args)
    ranks = ranks_here or min(world_size, RANKS_A_NODE)
    host = {
        "inputs_gib": memory.inputs / GIB,
        "save_gib": memory.copy / GIB,
        "node_gib": ranks * sum(memory) / GIB,
        "node_ranks": ranks,
    }
    spent = None if checked.plan is None else _spent(config, checked, checked.plan)
    return Report(config, world_size, checked, host, available, spent)


def _spent(config: JobConfig, checked: Checked, plan: Plan) -> Spent:
    args, settings, ledger = checked.args, plan.settings, plan.ledger
    count, batch = settings.implied_units, settings.expected_batch_size
    mechanism, trained = settings.mechanism, trained_count(args)
    steps = spent(ledger, lost=False).segments(mechanism, max(plan.steps - ledger.steps, 0))
    meaning = explain(ledger, steps, plan.epsilon)
    if_capped = None
    if mechanism.largest_share > 1:
        exact = Mechanism(mechanism.noise_multiplier, mechanism.sample_rate)
        if_capped = dataclasses.replace(settings, mechanism=exact).epsilon(plan.steps)
    _, dp_shard, cp = mesh_degrees(config)
    return Spent(
        plan=plan,
        trained=trained,
        noise=noise_of_run(mechanism, trained=trained, batch=batch, steps=plan.steps),
        kept_noise_gib=4 * (mechanism.period - 1) * trained / (dp_shard * cp) / GIB,
        cost=step_cost(config, args, records=count, rate=mechanism.sample_rate),
        meaning=tuple(meaning.sentences(ledger.settings.unit)) if meaning else (),
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


def show(report: Report) -> None:
    """Print a report for people, on stderr."""
    config, checked = report.config, report.checked
    show_records(config, checked)
    text = _TEXT.render(
        **vars(checked),
        config=config,
        spent=report.spent,
        host=report.host,
        left=report.available and report.available / GIB,
        drowns=DROWNS,
        command=typed("plan"),
        unit=unit_word(config),
        method=METHODS[config.privacy.gradient_method],
        tile=feed_forward_chunk(config) if skeleton(checked.args).gated else 0,
        notices=[*tokenizer_lines(config, checked.records.source), *notices(config)],
        model=describe(config, checked.args),
    )
    print(text, end="", file=sys.stderr)


def for_programs(report: Report, spent: Spent) -> dict[str, Any]:
    """Return a report as JSON has it."""
    plan = spent.plan
    return {
        "epsilon": plan.epsilon if plan.private else None,
        "epsilon_stated": plan.epsilon_stated if plan.private else None,
        "private": plan.private,
        **plan.settings.fields(),
        "steps": plan.steps,
        "parameters": parameter_count(report.checked.args),
        "trained_parameters": spent.trained,
        "world_size": report.world_size,
        **dataclasses.asdict(spent.cost),
        "host_memory": report.host,
        "signal": spent.noise.for_programs(),
        "recommendation": None,
        "choices": [],
    }
