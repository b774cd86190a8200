"""The plan's report: computed once, and shown as text for people and as JSON for programs."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.checkpoint.plan import Plan, steps_within
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import feed_forward_chunk, heldout_units, mesh_degrees, unit_word
from torchtitan_dp.distributed.host_memory import available_bytes
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger.account import explain
from torchtitan_dp.ledger.spending import initial_steps, own_steps
from torchtitan_dp.models.families import parameter_count, trained_count
from torchtitan_dp.models.hugging_face import describe
from torchtitan_dp.plan.cost import StepCost, step_cost
from torchtitan_dp.plan.memory import MemoryPlan
from torchtitan_dp.plan.recommend import Recommendation, recommend
from torchtitan_dp.plan.signal import Noise, noise_of_run
from torchtitan_dp.preflight.check import Checked, check_run, notices, show_records, tokenizer_lines
from torchtitan_dp.preflight.machine import NodeMemory, predict_host_memory, refuse_lack
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.mechanism import PoissonGaussian
from torchtitan_dp.process import lock_folder


@dataclass(frozen=True)
class Spent:
    """The spending, noise and cost of a run with privacy."""

    plan: Plan
    trained: int  # parameters
    noise: Noise
    cost: StepCost
    meaning: tuple[str, ...]  # of epsilon, for one person: sentences
    notes: tuple[str, ...]  # on correlated noise, lost steps and the like, if there are any
    recommended: Recommendation | None  # where it is asked for


@dataclass(frozen=True)
class Report:
    """All of a plan but a GPU's memory, which takes longer to predict."""

    config: JobConfig
    world_size: int
    checked: Checked
    host: NodeMemory
    spent: Spent | None  # None without privacy


def make_report(
    config: JobConfig,
    world_size: int,
    *,
    ranks_here: int | None = None,
    units: int | None = None,
    tflops: float | None = None,
    recommends: bool = False,
) -> Report:
    """Check a run, and compute what it will spend, by the plan's options; ValueError, one line.

    This machine must have the memory of `ranks_here`; `tflops` is in TFLOP/s a device.
    """
    left = available_bytes()  # before records are indexed
    checked = check_run(config, units=units)
    lock_folder(config.job.dump_folder).close()
    if ranks_here is not None:
        refuse_lack(config, checked.args, ranks_here, left)
    memory = predict_host_memory(config, checked.args)
    host = NodeMemory(memory, world_size, ranks_here, left)
    plan, spent = checked.plan, None
    if plan is not None:
        spent = _spent(config, checked, plan, tflops, recommends)
    return Report(config, world_size, checked, host, spent)


def _spent(
    config: JobConfig, checked: Checked, plan: Plan, tflops: float | None, recommends: bool
) -> Spent:
    args, settings, ledger = checked.args, plan.settings, plan.ledger
    count, batch = settings.implied_units, settings.expected_batch_size
    mechanism, trained = settings.mechanism, trained_count(args)
    segments = [*initial_steps(ledger), *own_steps(ledger, plan.steps)]
    meaning = explain(ledger, segments, plan.epsilon)
    return Spent(
        plan=plan,
        trained=trained,
        noise=noise_of_run(mechanism, trained=trained, batch=batch, steps=plan.steps),
        cost=step_cost(config, args, records=count, rate=mechanism.sample_rate, tflops=tflops),
        meaning=tuple(meaning.sentences(ledger.settings.unit)) if meaning else (),
        notes=(
            *_estimated(config, plan),
            *_correlated(plan),
            *_published_losses(config, plan, len(checked.records.heldout)),
            *_lost_steps(config, plan),
        ),
        recommended=recommend(config, plan, args, checked.start) if recommends else None,
    )


def show(report: Report) -> None:
    """Print a report for people, on stderr."""
    show_records(report.config, report.checked)
    print("\n".join(_text(report)), file=sys.stderr)
    if report.spent and report.spent.recommended:
        report.spent.recommended.show()


def _text(report: Report) -> list[str]:
    config, checked, spent = report.config, report.checked, report.spent
    model = [describe(config, checked.args), *filter(None, [report.host.describe()])]
    if spent is None:
        return ["plan: without privacy (privacy.enable = false)", *_indented(model)]
    plan = spent.plan
    resumes = f"resuming after step {checked.start.step} of {plan.steps}"
    warnings = filter(None, (*plan.warnings, spent.noise.warning()))
    heading, *terms = _terms(report, plan)
    return [
        *(f"warning: {warning}" for warning in warnings),
        *([resumes] if checked.start.resumes else []),
        heading,
        *_indented(
            [
                *terms,
                *spent.notes,
                *tokenizer_lines(config, checked.records.source),
                *notices(config),
                *(f"caveat: {caveat}" for caveat in plan.ledger.caveats),
                *model,
                spent.noise.describe(spent.trained, plan.settings.clipping),
                spent.cost.describe(),
                *spent.meaning,
            ]
        ),
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"      {line}" for line in lines]


def _terms(report: Report, plan: Plan) -> list[str]:
    config, records, settings = report.config, report.checked.records, plan.settings
    windows, tile = settings.windows_per_draw, feed_forward_chunk(config)
    averaged = "" if windows == 1 else f"{windows} averaged windows of "
    spent = f"epsilon = {rounded_up(plan.epsilon)}" if plan.private else "NOT private"
    secret = "" if settings.neighbouring_relation == "zero_out" else "not private: "
    method = config.privacy.gradient_method
    return [
        f"plan: {spent} at delta = {settings.delta:g} after {plan.steps} steps "
        f"({settings.accountant}; unit: one {settings.privacy_unit}; "
        f"neighbours: {settings.neighbouring_relation})",
        f"sigma = {settings.mechanism.noise_multiplier:.4g}, C = {settings.max_grad_norm:g}, "
        f"q = {settings.mechanism.sample_rate:.4g} from {settings.sample_rate_source}",
        f"{secret}{len(records.train):,} training {unit_word(config)}s, "
        f"{len(records.heldout):,} held out; "
        f"{settings.expected_batch_size} per step on average, "
        f"{averaged}at most {config.training.seq_len:,} tokens each; "
        f"targets: {settings.targets}",
        f"gradient method: {method} ({METHODS[method].chosen_for}); "
        f"clipping: {settings.clipping}"
        f"{f'; blocks in tiles of {tile:,} tokens' if tile else ''}",
    ]


def _estimated(config: JobConfig, plan: Plan) -> list[str]:
    """Return a line on the errors of estimated norms, where norms are estimated."""
    if not METHODS[config.privacy.gradient_method].estimates_norms:
        return []
    settings, mechanism = plan.settings, plan.settings.mechanism
    norms = f"norms: estimated by {config.privacy.norm_estimator} ({mechanism.norms})"
    if mechanism.largest_share == 1:
        return [f"{norms}; longer gradients are scaled down to their estimate: at most C"]
    exact = PoissonGaussian(mechanism.noise_multiplier, mechanism.sample_rate)
    capped = dataclasses.replace(settings, mechanism=exact).epsilon(plan.steps)
    return [
        f"{norms}; a clipped gradient may reach {rounded_up(mechanism.largest_share, digits=3)} C; "
        f"privacy.underestimates = 'capped' would spend epsilon = {rounded_up(capped)}",
    ]


def _correlated(plan: Plan) -> list[str]:
    """Return a line on noise that is correlated over steps, if it is."""
    mechanism = plan.settings.mechanism
    if not mechanism.noise:
        return []
    bands, one = mechanism.period, mechanism.noise_multiplier
    in_step, in_sum = (noise / one for noise in mechanism.noise_of_run(max(plan.steps, 1)))
    return [
        f"{mechanism.noise}: each of {bands} groups of units is drawn from at every {bands}th "
        f"step, with probability {mechanism.draw_rate:.3g}; noise in a step {in_step:.3g} times, "
        f"in the sum of all steps {in_sum:.3g} times that of independent noise of this sigma"
    ]


def _published_losses(config: JobConfig, plan: Plan, heldout: int) -> list[str]:
    """Return a line on held-out losses that may be published, with their error bar."""
    losses = plan.ledger.heldout_losses
    if losses is None:
        return []
    replicate, shard, _ = mesh_degrees(config)
    at_once = replicate * shard * config.training.local_batch_size
    units = heldout_units(heldout, config.validation.steps, at_once)
    count = losses.evaluations(plan.ledger.steps + 1, plan.steps)
    bar = losses.noise.standard_deviation(clip=losses.clip, units=units)
    spent = losses.noise.epsilon(count, delta=losses.delta)
    return [
        f"held-out loss to publish: {count} evaluations of {units:,} {unit_word(config)}s, "
        f"clipped to {losses.clip:g} nats, {losses.noise.kind.capitalize()} noise of standard "
        f"deviation {bar:.2g} nats; together epsilon = {rounded_up(spent)} at delta = "
        f"{losses.delta:g} for each of these, which are not trained on"
    ]


def _lost_steps(config: JobConfig, plan: Plan) -> list[str]:
    """Say which epsilon a release will state, where crashes lost steps, and what keeps a target."""
    target, lost = config.privacy.target_epsilon, plan.ledger.lost
    if not (lost and plan.private):
        return []
    stated = f"a release will state epsilon = {rounded_up(plan.epsilon_stated)}"
    lines = [f"steps lost in crashes, counted as {lost}: {stated}"]
    if target is not None and plan.epsilon_stated > target:
        steps = steps_within(plan, target)
        shorter = f"training.steps = {steps} and release --stop_not_from_results, or "
        lines.append(
            f"above privacy.target_epsilon = {target:g}; to keep that: "
            f"{'' if steps is None else shorter}release --lost_steps_not_seen, if nobody saw "
            "anything of the lost steps"
        )
    return lines


def for_programs(report: Report, spent: Spent, memory: MemoryPlan | None) -> dict[str, Any]:
    """Return a report as JSON has it, with the memory if it was predicted."""
    plan, recommended = spent.plan, spent.recommended
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
        **(memory.for_programs() if memory else {}),
        "host_memory": report.host.for_programs(),
        "signal": spent.noise.for_programs(),
        "recommendation": recommended and recommended.for_programs(),
    }
