"""The plan of a run: its epsilon, samples, noise, cost and memory, before anything is started.

    python -m torchtitan_dp.plan --job.config_file FILE [--section.key value …] [--world_size N]
                                 [--ranks_here R] [--memory_gib G] [--json FILE]
                                 [--plot FILE.png] [--recommend]

Checks everything that one process can check: `run_train.sh` runs it first. A user's mistake is one
line and exit code 2. A prediction of memory (`memory`) takes longer, and is made with
`--memory_gib` (then a run that does not fit is a mistake too), `--json` or `--plot`. The share of
noise in an update is always shown (`signal`); `--recommend` compares batches and steps. So is the
memory of hosts, if much is kept there; `--ranks_here`, which each start gives, compares it with
this machine's.
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from torchtitan_dp.checkpoint.plan import Plan, steps_within
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import feed_forward_chunk, heldout_units, mesh_degrees, unit_word
from torchtitan_dp.config.load import exit_on_mistake, load_config, parse_known, write_json
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.distributed.host_memory import available_bytes
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger.account import explain
from torchtitan_dp.ledger.spending import before, own
from torchtitan_dp.models.families import ModelArgs, parameter_count, trained_count
from torchtitan_dp.models.hugging_face import describe
from torchtitan_dp.plan.cost import StepCost, step_cost
from torchtitan_dp.plan.memory import DEFAULT_GIB, MemoryPlan, predicting
from torchtitan_dp.plan.recommend import (
    noise_line,
    noise_warning,
    plan_noise,
    recommend,
    refuse,
)
from torchtitan_dp.plan.report import plot, report
from torchtitan_dp.preflight.check import check_run, notices, show_records, tokenizer_lines
from torchtitan_dp.preflight.machine import NodeMemory, predict_host_memory, refuse_lack
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.mechanism import PoissonGaussian
from torchtitan_dp.process import lock_folder


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the plan's own options, and leave the configuration's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.plan",
        description=description,
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    for name, kind, metavar, says in (
        ("--world_size", int, "N", "processes; default: NGPU, else 1"),
        (
            "--ranks_here",
            int,
            "R",
            "of them that start here: exit with code 2 if the host is too small",
        ),
        ("--units", int, "N", "plan for so many records or units, before there are any"),
        ("--memory_gib", float, "G", "of a GPU: exit with code 2 if the run does not fit"),
        ("--json", str, "FILE", "write the plan there; - is stdout"),
        ("--tflops", float, "F", "that a device sustains, in TFLOP/s: also estimate the time"),
        ("--plot", str, "FILE.png", "draw a rank's memory, by category"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=says)
    parser.add_argument(
        "--recommend",
        action="store_true",
        help="list batches, steps and adapters by the noise they leave at the same compute",
    )
    parser.add_argument("--no_memory", action="store_true", help="--json without memory: quick")
    return parse_known(parser, argv)


def world_size_of(options: argparse.Namespace) -> int:
    """Check the options, and return the number of processes.

    Raises:
        ValueError: one line for the user.
    """
    for name, unit in (("memory_gib", "GiB"), ("tflops", "TFLOP/s")):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{name} = {value}: must be a positive number of {unit}")
    given = options.world_size
    text = os.environ.get("NGPU", "1") if given is None else str(given)
    if not (text.isdecimal() and int(text) >= 1):
        name = "NGPU" if given is None else "--world_size"
        raise ValueError(f"{name} = '{text}': must be a number of processes, 1 or more")
    if options.units is not None and options.units < 1:
        raise ValueError(f"--units = {options.units}: must be 1 or more")
    if options.ranks_here is not None and not 1 <= options.ranks_here <= int(text):
        raise ValueError(
            f"--ranks_here = {options.ranks_here}: must be from 1 to {text}, all ranks"
        )
    return int(text)


def main(argv: list[str]) -> None:
    options, overrides = parse(argv, (__doc__ or "").splitlines()[0])
    with exit_on_mistake():
        world_size = world_size_of(options)
        config = load_config(overrides, world_size)
        if options.recommend:
            refuse(config)
    asked = options.memory_gib is not None or options.json or options.plot
    if not asked or options.no_memory or not config.privacy.enable:
        _plan(options, config, world_size, None)
        return
    with predicting(overrides, world_size, options.memory_gib or DEFAULT_GIB) as memory:
        _plan(options, config, world_size, memory)  # beside the prediction


def _plan(
    options: argparse.Namespace,
    config: JobConfig,
    world_size: int,
    predicted: Callable[[], MemoryPlan] | None,
) -> None:
    left = available_bytes()  # before records are indexed
    with exit_on_mistake():
        checked = check_run(config, units=options.units)
        args, records, plan = checked.args, checked.records, checked.plan
        lock_folder(config.job.dump_folder).close()
        here = options.ranks_here
        if here is not None:
            refuse_lack(config, args, here, left)
    host = NodeMemory.of(predict_host_memory(config, args), world_size, here, left)
    model = f"      {describe(config, args)}"
    if (line := host.describe()) is not None:
        model += f"\n      {line}"
    show_records(config, checked)
    if plan is None:
        print(f"plan: without privacy (privacy.enable = false)\n{model}", file=sys.stderr)
        if options.memory_gib is not None or options.json or options.plot:
            print("      nothing more is predicted without privacy", file=sys.stderr)
        return
    trained = trained_count(args)
    noise = plan_noise(plan, trained)
    for warning in filter(None, (*plan.warnings, noise_warning(noise))):
        print(f"warning: {warning}", file=sys.stderr)
    if checked.start.resumes:
        print(f"resuming after step {checked.start.step} of {plan.steps}", file=sys.stderr)
    _show(config, plan, records)
    for notice in tokenizer_lines(config, checked.records.source) + notices(config):
        print(f"      {notice}", file=sys.stderr)
    for caveat in plan.ledger.caveats:
        print(f"      caveat: {caveat}", file=sys.stderr)
    print(f"{model}\n      {noise_line(noise, plan.settings, trained)}", file=sys.stderr)
    count, rate = plan.settings.implied_units, plan.settings.mechanism.sample_rate
    costs = step_cost(config, args, records=count, rate=rate, tflops=options.tflops)
    print(f"      {costs.describe()}", file=sys.stderr)
    ledger = plan.ledger
    spent = [*before(ledger), *own(ledger, plan.steps)]
    meaning = explain(ledger, spent, plan.epsilon)
    for line in meaning.sentences(ledger.settings.unit) if meaning else ():
        print(f"      {line}", file=sys.stderr)
    recommended = None
    if options.recommend:
        with exit_on_mistake():
            recommended = recommend(config, plan, args, checked.start)
        recommended.show()
    memory = predicted() if predicted else None
    if memory is not None and options.plot:
        with exit_on_mistake():
            plot(memory, options.plot)
    if options.json:
        content = _for_programs(plan, args, world_size, costs, memory)
        content["host_memory"] = host.for_programs()
        content["signal"] = noise.for_programs()
        content["recommendation"] = recommended and recommended.for_programs()
        write_json(options.json, content)
    if memory is not None:
        with exit_on_mistake():
            report(memory, config, limited=options.memory_gib is not None)


def _show(config: JobConfig, plan: Plan, records: Records) -> None:
    settings, method = plan.settings, config.privacy.gradient_method
    windows = settings.windows_per_draw
    averaged = "" if windows == 1 else f"{windows} averaged windows of "
    spent = f"epsilon = {rounded_up(plan.epsilon)}" if plan.private else "NOT private"
    tile = feed_forward_chunk(config)
    lines = [
        f"plan: {spent} at delta = {settings.delta:g} after {plan.steps} steps "
        f"({settings.accountant}; unit: one {settings.privacy_unit}; "
        f"neighbours: {settings.neighbouring_relation})",
        f"      sigma = {settings.mechanism.noise_multiplier:.4g}, C = {settings.max_grad_norm:g}, "
        f"q = {settings.mechanism.sample_rate:.4g} from {settings.sample_rate_source}",
        f"      {'' if settings.neighbouring_relation == 'zero_out' else 'not private: '}"
        f"{len(records.train):,} training {unit_word(config)}s, "
        f"{len(records.heldout):,} held out; "
        f"{settings.expected_batch_size} per step on average, "
        f"{averaged}at most {config.training.seq_len:,} tokens each; "
        f"targets: {settings.targets}",
        f"      gradient method: {method} ({METHODS[method].chosen_for}); "
        f"clipping: {settings.clipping}"
        f"{f'; blocks in tiles of {tile:,} tokens' if tile else ''}",
        *_estimated(config, plan),
        *_correlated(plan),
        *_published_losses(config, plan, len(records.heldout)),
        *_lost_steps(config, plan),
    ]
    print("\n".join(lines), file=sys.stderr)


def _correlated(plan: Plan) -> list[str]:
    """Return a line on correlated noise, where it is."""
    mechanism = plan.settings.mechanism
    if not mechanism.noise:
        return []
    bands, rate = mechanism.period, mechanism.draw_rate
    one = mechanism.noise_multiplier
    in_step, in_sum = (noise / one for noise in mechanism.noise_of_run(max(plan.steps, 1)))
    return [
        f"      {mechanism.noise}: each of {bands} groups of units is drawn from at every "
        f"{bands}th step, with probability {rate:.3g}; noise in a step {in_step:.3g} times, in the "
        f"sum of all steps {in_sum:.3g} times that of independent noise of this sigma"
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
        f"      held-out loss to publish: {count} evaluations of {units:,} {unit_word(config)}s, "
        f"clipped to {losses.clip:g} nats, {losses.noise.kind.capitalize()} noise of standard "
        f"deviation {bar:.2g} nats; together epsilon = {rounded_up(spent)} at delta = "
        f"{losses.delta:g} for each of these, which are not trained on"
    ]


def _estimated(config: JobConfig, plan: Plan) -> list[str]:
    """Return a line on the errors of estimated norms, where norms are estimated."""
    if not METHODS[config.privacy.gradient_method].estimates_norms:
        return []
    settings, mechanism = plan.settings, plan.settings.mechanism
    norms = f"      norms: estimated by {config.privacy.norm_estimator} ({mechanism.norms})"
    if mechanism.largest_share == 1:
        return [f"{norms}; longer gradients are scaled down to their estimate: at most C"]
    exact = PoissonGaussian(mechanism.noise_multiplier, mechanism.sample_rate)
    capped = dataclasses.replace(settings, mechanism=exact).epsilon(plan.steps)
    return [
        f"{norms}; a clipped gradient may reach {rounded_up(mechanism.largest_share, digits=3)} C; "
        f"privacy.underestimates = 'capped' would spend epsilon = {rounded_up(capped)}",
    ]


def _lost_steps(config: JobConfig, plan: Plan) -> list[str]:
    """Say which epsilon a release will state, where crashes lost steps, and what keeps a target."""
    target, lost = config.privacy.target_epsilon, plan.ledger.lost
    if not (lost and plan.private):
        return []
    stated = f"a release will state epsilon = {rounded_up(plan.epsilon_stated)}"
    lines = [f"      steps lost in crashes, counted as {lost}: {stated}"]
    if target is not None and plan.epsilon_stated > target:
        steps = steps_within(plan, target)
        shorter = f"training.steps = {steps} and release --stop_not_from_results, or "
        lines.append(
            f"      above privacy.target_epsilon = {target:g}; to keep that: "
            f"{'' if steps is None else shorter}release --lost_steps_not_seen, if nobody saw "
            "anything of the lost steps"
        )
    return lines


def _for_programs(
    plan: Plan, args: ModelArgs, world_size: int, costs: StepCost, memory: MemoryPlan | None
) -> dict[str, Any]:
    return {
        "epsilon": plan.epsilon if plan.private else None,
        "epsilon_stated": plan.epsilon_stated if plan.private else None,
        "private": plan.private,
        **plan.settings.fields(),
        "steps": plan.steps,
        "parameters": parameter_count(args),
        "trained_parameters": trained_count(args),
        "world_size": world_size,
        **dataclasses.asdict(costs),
        **(memory.for_programs() if memory else {}),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
