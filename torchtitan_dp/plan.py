"""What a configuration will spend and run, said before anything is started.

    python -m torchtitan_dp.plan --job.config_file FILE [--section.key value …] [--world_size N]
                                 [--memory_gib G] [--json FILE] [--plot FILE.png]

Checks all that can be checked in one plain process: `run_train.sh` runs it first. A user's mistake
is one line and exit code 2. Memory (`planning`) takes longer, and is predicted when asked for:
by `--memory_gib` (then a run that does not fit is a mistake too), `--json` or `--plot`.
"""

import argparse
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.cli import exit_on_mistake, load_config
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.excerpts import scan_undecodable
from torchtitan_dp.data.opening import Records, noun, privacy_unit
from torchtitan_dp.data.tokenizer import load_tokenizer
from torchtitan_dp.ledger import (
    PRIVACY_FILE,
    ExecutedSteps,
    Ledger,
    Settings,
    check_fingerprint,
    read_published,
)
from torchtitan_dp.models.hugging_face import describe, origin, parameter_count, shape
from torchtitan_dp.models.hugging_face_weights import check_files
from torchtitan_dp.models.llama3 import LlamaArgs
from torchtitan_dp.planning.cost import StepCost, step_cost
from torchtitan_dp.planning.memory import DEFAULT_GIB, MemoryPlan, predict
from torchtitan_dp.planning.options import check, parse
from torchtitan_dp.planning.report import plot, report
from torchtitan_dp.privacy import accounting
from torchtitan_dp.process import lock_folder


@dataclass(frozen=True)
class Plan:
    """What a run spends."""

    settings: Settings
    steps: int
    epsilon: float
    private: bool
    warnings: tuple[str, ...]


def make_plan(config: JobConfig, records: int, before: Ledger | None) -> Plan:
    """Noise, sampling rate and epsilon of a run.

    Args:
        records: number of training records, or units.
        before: the ledger of the run that this one resumes, whose noise and rate are kept.

    Raises:
        ValueError: one line for the user.
    """
    privacy, steps = config.privacy, config.training.steps
    batch = config.training.global_batch_size
    if privacy.sample_rate is not None:
        rate, source, relation = privacy.sample_rate, "privacy.sample_rate", "add_remove"
    else:
        rate, relation = batch / records, "zero_out"
        source = f"training.global_batch_size / number of training {noun(config)}s"
        source += " (which is public)"
        if rate > 1:
            raise ValueError(
                f"training.global_batch_size = {batch}: more than the {records} training "
                f"{noun(config)}s, so the sample rate would exceed 1; use at most {records}"
            )
    assert privacy.delta is not None
    assert privacy.accountant != "pld"
    warnings = []
    if privacy.delta >= 1 / records:
        warnings.append(
            f"privacy.delta = {privacy.delta:g} is at least 1 / number of {noun(config)}s "
            f"({1 / records:.2g}): such a delta allows publishing a {noun(config)} outright; use "
            "less"
        )
    sigma = privacy.noise_multiplier
    if sigma is None and before is not None:
        sigma = before.settings.noise_multiplier
    if sigma is None:
        assert privacy.target_epsilon is not None
        sigma = accounting.noise_multiplier(
            target_epsilon=privacy.target_epsilon,
            delta=privacy.delta,
            sample_rate=rate,
            steps=steps,
            accountant=privacy.accountant,
        )
    settings = Settings(
        noise_multiplier=float(sigma),
        sample_rate=rate,
        max_grad_norm=float(privacy.max_grad_norm),
        delta=privacy.delta,
        expected_batch_size=batch,
        accountant=privacy.accountant,
        sample_rate_source=source,
        neighbouring_relation=relation,
        privacy_unit=privacy_unit(config),
    )
    if before is not None:
        settings.refuse_change(since=before.settings)
    epsilon = settings.epsilon(steps)
    if privacy.target_epsilon is not None and epsilon > privacy.target_epsilon:
        raise ValueError(
            f"privacy.target_epsilon = {privacy.target_epsilon:g}: this run's noise was fixed at "
            f"its first start, and {steps} training.steps would spend {epsilon:.4g}; lower "
            "training.steps, raise the target, or start afresh in another job.dump_folder"
        )
    if sigma == 0:
        warnings.append("privacy.noise_multiplier = 0: the run is NOT private")
    if privacy.debug_seed is not None:
        warnings.append("privacy.debug_seed is set: the run is NOT private")
    private = sigma > 0 and privacy.debug_seed is None and (before is None or before.private)
    return Plan(settings, steps, epsilon, private, tuple(warnings))


def earlier_ledger(folder: str) -> Ledger | None:
    """The ledger of what already ran in this folder; None if nothing did.

    Raises:
        ValueError: if steps were begun whose terms are no longer known.
    """
    begun = ExecutedSteps(folder).count
    if begun == 0:
        return None
    ledger = read_published(folder)
    if ledger is None:
        raise ValueError(
            f"job.dump_folder = '{folder}': {begun} steps were begun here, but {PRIVACY_FILE}, "
            "which says on what terms, is gone; restore it, or use another folder"
        )
    return ledger


def refuse_private_folder(folder: str) -> None:
    """Raises ValueError if a private run lives here: one without privacy would go on from its
    weights beside a `privacy.json` that no longer holds."""
    if os.path.exists(os.path.join(folder, PRIVACY_FILE)) or ExecutedSteps(folder).count > 0:
        raise ValueError(
            f"privacy.enable = false: job.dump_folder = '{folder}' holds a private run; give this "
            "one its own job.dump_folder"
        )


def check_model(config: JobConfig) -> LlamaArgs:
    """The model's shape. Raises ValueError if it is none of ours, or its files do not fit it."""
    args = shape(config)
    check_files(config, args)
    tokens = load_tokenizer(config.model.hf_assets_path).get_vocab_size()
    if tokens > args.vocab_size:
        raise ValueError(
            f"model.hf_assets_path = '{config.model.hf_assets_path}': its tokenizer has {tokens} "
            f"tokens, more than the {args.vocab_size} of {origin(config)}; use the model's own "
            "tokenizer"
        )
    return args


def main(argv: list[str]) -> None:
    options, overrides = parse(argv, (__doc__ or "").splitlines()[0])
    with exit_on_mistake():
        world_size = check(options)
        config = load_config(overrides, world_size)
        args = check_model(config)
        records = Records.open(config)
        if config.data.on_undecodable == "error":
            trained = (record for unit in records.train for record in records.units.records(unit))
            bad = scan_undecodable(records.store, trained)
            if bad:
                count = sum(len(records.units.places(unit)) for unit in records.train)
                raise ValueError(
                    f"data.on_undecodable = 'error': {bad} of {count} records cannot "
                    "be decoded; mend them, or set it to 'empty' (they then contribute nothing)"
                )
        folder = config.job.dump_folder
        if not config.privacy.enable:
            refuse_private_folder(folder)
        else:
            check_fingerprint(folder, records.fingerprint)
            plan = make_plan(config, len(records.train), earlier_ledger(folder))
        lock_folder(folder).close()
    model = f"      {describe(config, args)}"
    if not config.privacy.enable:
        print(f"plan: without privacy (privacy.enable = false)\n{model}", file=sys.stderr)
        if options.memory_gib is not None or options.json or options.plot:
            print("      nothing more is predicted without privacy", file=sys.stderr)
        return
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    _show(config, plan, records)
    print(model, file=sys.stderr)
    rate, count = plan.settings.sample_rate, len(records.train)
    costs = step_cost(config, args, records=count, rate=rate, tflops=options.tflops)
    print(f"      {costs.describe()}", file=sys.stderr)
    with exit_on_mistake():
        memory = _predict_memory(options, overrides, world_size)
    if options.json:
        _write(options.json, _for_programs(plan, args, world_size, costs, memory))
    if memory is not None:
        with exit_on_mistake():
            report(memory, config, overrides, limited=options.memory_gib is not None)


def _predict_memory(
    options: argparse.Namespace, overrides: list[str], world_size: int
) -> MemoryPlan | None:
    asked = options.memory_gib is not None or options.json or options.plot
    if not asked or options.no_memory:
        return None
    memory = predict(overrides, world_size, options.memory_gib or DEFAULT_GIB)
    if options.plot:
        plot(memory, options.plot)
    return memory


def _show(config: JobConfig, plan: Plan, records: Records) -> None:
    settings = plan.settings
    spent = f"epsilon = {plan.epsilon:.4g}" if plan.private else "NOT private"
    lines = [
        f"plan: {spent} at delta = {settings.delta:g} after {plan.steps} steps "
        f"({settings.accountant}; unit: one {settings.privacy_unit}; "
        f"neighbours: {settings.neighbouring_relation})",
        f"      sigma = {settings.noise_multiplier:.4g}, C = {settings.max_grad_norm:g}, "
        f"q = {settings.sample_rate:.4g} from {settings.sample_rate_source}",
        f"      {'' if settings.neighbouring_relation == 'zero_out' else 'not private: '}"
        f"{len(records.train):,} {noun(config)}s to train on, {len(records.heldout):,} held out; "
        f"{settings.expected_batch_size} expected in a step, "
        f"of at most {config.training.seq_len:,} tokens each",
    ]
    print("\n".join(lines), file=sys.stderr)


def _for_programs(
    plan: Plan, args: LlamaArgs, world_size: int, costs: StepCost, memory: MemoryPlan | None
) -> dict[str, Any]:
    return {
        "epsilon": plan.epsilon if plan.private else None,
        "private": plan.private,
        **dataclasses.asdict(plan.settings),
        "steps": plan.steps,
        "parameters": parameter_count(args),
        "world_size": world_size,
        **dataclasses.asdict(costs),
        **(memory.for_programs() if memory else {}),
    }


def _write(path: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
