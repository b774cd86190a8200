"""Attack the trainer, and report a lower bound on how much it leaks.

    python -m torchtitan_dp.audit --job.config_file FILE [--section.key value …]
        [--instrument game|canaries] [--canaries N] [--guesses F] [--trials N] [--confidence P]
        [--folder DIR] [--json FILE] [--plot FILE.png]

In one plain process, or in several under torchrun. `game` plays single steps of a tiny model on the
configuration's terms (`audit.game`); `canaries` trains the configured model once, in a folder of
its own, on the records and on canaries (`audit.one_run`). Exit code 1 if more leaks than is
claimed, 2 for a user's mistake.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from torchtitan_dp.audit import report
from torchtitan_dp.audit.game import Game, cases
from torchtitan_dp.audit.one_run import CanaryAudit, audit
from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.checkpoint.start import Start, decision, plan_start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.config.load import exit_on_mistake, load_config, parse_known, write_json
from torchtitan_dp.distributed.agreement import shared_root_key
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger import PRIVACY_FILE, ExecutedSteps, Settings
from torchtitan_dp.ledger.files import read_published_fields
from torchtitan_dp.models.families import ModelArgs, trained_count
from torchtitan_dp.models.lora import lora_of
from torchtitan_dp.preflight.check import open_records
from torchtitan_dp.preflight.model import check_model
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.lower_bounds import expected_mu
from torchtitan_dp.process import forbid_core_dumps, lock_folder, write_atomically
from torchtitan_dp.train_spec import register

RESULT_FILE = "audit.json"
_CANARIES = 1000
_OPTIONS: tuple[tuple[str, Any, str, Any, str, str], ...] = (  # of one instrument alone
    ("trials", int, "N", 2000, "game", "steps with the unit, and as many without"),
    ("canaries", int, "N", _CANARIES, "canaries", "how many"),
    # The default share is near the best for claims from 3 to 12.
    ("guesses", float, "F", 0.2, "canaries", "the share to guess at"),
    ("folder", str, "DIR", None, "canaries", "of the audited run (<job.dump_folder>_audit)"),
)
"""Name, type, metavar, default, instrument and meaning."""

# A correct step meets a game's claim exactly; the canaries' bound is far below a true claim.
_CONFIDENCE = {"game": 0.999, "canaries": 0.95}


def parse(argv: list[str], description: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the audit's own options, and return the configuration's command line too."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_dp.audit",
        description=description,
        epilog="Any --section.key value of the configuration is taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--instrument",
        choices=("game", "canaries"),
        default="canaries",
        help="game: single steps of a tiny model, with a unit and without; canaries: one training "
        "run of the configured model with units that are included by chance (default)",
    )
    for name, kind, metavar, default, of, meaning in _OPTIONS:
        text = f"{of}: {meaning}" + (f" ({default})" if default is not None else "")
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    text = f"of the bound ({_CONFIDENCE})"
    parser.add_argument("--confidence", type=float, metavar="P", help=text)
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is stdout")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    return parse_known(parser, argv)


def check(options: argparse.Namespace) -> None:
    """Check the options, and set missing ones to their defaults, in place."""
    for name, _, _, default, of, _ in _OPTIONS:
        if (given := getattr(options, name)) is None:
            setattr(options, name, default)
        elif of != options.instrument:
            raise ValueError(f"--{name} = {given}: only --instrument {of} has it; remove it")
    if options.confidence is None:
        options.confidence = _CONFIDENCE[options.instrument]
    if not 0 < options.confidence < 1:
        raise ValueError(f"--confidence = {options.confidence}: must be between 0 and 1 (0.95)")
    if options.trials < 1:
        raise ValueError(f"--trials = {options.trials}: must be at least 1")
    if not 0 < options.guesses <= 1:
        raise ValueError(f"--guesses = {options.guesses}: a share, above 0 and at most 1")
    if round(options.guesses * options.canaries) < 1:
        raise ValueError(
            f"--canaries = {options.canaries}: with --guesses = {options.guesses} none would be "
            f"guessed at; plant more (the default is {_CANARIES})"
        )


def check_power(options: argparse.Namespace, args: ModelArgs, settings: Settings) -> None:
    """Refuse, by ValueError, an audit that could not detect a fault, or not be run."""
    if options.instrument == "canaries":
        if options.canaries > (values := trained_count(args)):
            raise ValueError(
                f"--canaries = {options.canaries}: each needs a value of its own, and the model "
                f"trains {values:,}; ask for fewer"
            )
        return
    sigma, confidence = settings.mechanism.noise_multiplier, share_of(options.confidence)

    def suffice(trials: int) -> bool:
        expected = expected_mu(2 / sigma, trials, confidence)
        return expected > settings.mechanism.claimed_mu(trials=trials, confidence=confidence)

    if not suffice(options.trials):
        proposed = (digit * 10**power for power in range(1, 6) for digit in range(1, 10))
        enough = next((trials for trials in proposed if suffice(trials)), None)
        remedy = (
            f"{enough:,} suffice"
            if enough is not None
            else "audit another noise (--privacy.target_epsilon None --privacy.noise_multiplier 1)"
        )
        raise ValueError(
            f"--trials = {options.trials}: too few to tell sigma = {sigma:.4g} from half of it; "
            f"{remedy}"
        )


def share_of(confidence: float) -> float:
    """Return the confidence of each case with which all cases together have `confidence`."""
    return 1 - (1 - confidence) / len(cases(2))


def prepare_run(config: JobConfig, folder: str) -> None:
    """Make `config` the audited run's, in place: a folder of its own, no output but the weights.
    Raise ValueError if a run lives in that folder."""
    if os.path.exists(os.path.join(folder, PRIVACY_FILE)) or ExecutedSteps(folder).count > 0:
        raise ValueError(
            f"--folder = '{folder}': a run lives here, and an audited one is never private; name "
            "another folder"
        )
    config.job.dump_folder = folder
    config.validation.enable = False
    config.metrics.enable_tensorboard = False
    config.metrics.enable_wandb = config.metrics.enable_mlflow = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False
    loads = config.checkpoint.initial_load_path or config.checkpoint.initial_load_in_hf
    config.checkpoint.enable = bool(loads)
    config.checkpoint.last_save_in_hf = False


def main(argv: list[str]) -> None:
    options, overrides = parse(argv, (__doc__ or "").splitlines()[0])
    forbid_core_dumps()
    os.umask(0o077)
    with exit_on_mistake():
        check(options)
        config = load_config(overrides, int(os.environ.get("WORLD_SIZE", "1")))
        if not config.privacy.enable:
            raise ValueError("privacy.enable = false: nothing is claimed; set it to true")
        method = config.privacy.gradient_method
        if options.instrument == "canaries" and not METHODS[method].whole_gradients:
            raise ValueError(
                f"privacy.gradient_method = '{method}': a canary is planted in a sample's whole "
                "gradient, which never exists here; audit it with --instrument game, or set "
                "another method"
            )
        if options.instrument == "canaries" and config.privacy.noise == "banded":
            raise ValueError(
                "privacy.noise = 'banded': a canary is in no group of units; audit it with "
                "--instrument game, or set it to 'independent'"
            )
        if options.instrument == "canaries":
            prepare_run(config, options.folder or config.job.dump_folder.rstrip("/") + "_audit")
        decide = decision(config)
        args = check_model(config, decide())
        records = open_records(config)
        plan = plan_start(config, len(records.train), decide(), None)
        if plan.settings.mechanism.noise_multiplier == 0:
            raise ValueError("privacy.noise_multiplier = 0: nothing is claimed; give it noise")
        check_power(options, args, plan.settings)
    _start_ranks()
    if options.instrument == "game":
        root = shared_root_key(torch.device(device_type), config.privacy.debug_seed)
        result = play_game(config, plan, root, trials=options.trials, confidence=options.confidence)
    else:
        canaries = train_with_canaries(options, config, decide)
        result = canaries.result
    if dist.get_rank() == 0:
        if options.instrument == "canaries":
            _publish(config.job.dump_folder, result)
        print("\n".join(report.table(result)), file=sys.stderr)
        if options.json:
            write_json(options.json, result)
        if options.plot and options.instrument == "game":
            report.plot_game(result, options.plot)
        elif options.plot:
            report.plot_canaries(canaries, options.plot)
    dist.destroy_process_group()
    if result["exceeds_claim"]:
        raise SystemExit(1)


def _start_ranks() -> None:
    """Join torchrun's process group, or start one of this process alone."""
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group()
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def play_game(
    config: JobConfig, plan: Plan, root: RootKey, *, trials: int, confidence: float
) -> dict[str, Any]:
    """Play all cases of the game on the terms of `config`, and return the content of `--json`.

    Args:
        root: the same on all ranks; its keys are used up.

    Collective over the world.
    """
    game = Game(
        config.privacy,
        plan.settings.mechanism,
        batch_size=config.training.local_batch_size,
        degrees=mesh_degrees(config),
        root=root,
        lora=lora_of(config),
    )
    each = share_of(confidence)
    outcomes = [game.play(case, trials=trials, confidence=each) for case in game.cases]
    return report.game_for_programs(
        outcomes,
        mu_claimed=game.claim(trials=trials, confidence=each),
        delta=plan.settings.delta,
        steps=game.steps,
        trials=trials,
        confidence=confidence,
    )


def train_with_canaries(
    options: argparse.Namespace, config: JobConfig, decide: Callable[[], Start]
) -> CanaryAudit:
    """Run the canary audit in its own folder, locked. Collective over the world."""
    register(config, decide=decide)
    lock = lock_folder(config.job.dump_folder) if dist.get_rank() == 0 else None
    level = logger.level
    logger.setLevel(logging.ERROR)  # no warning that the process group exists already
    try:
        guesses = round(options.guesses * options.canaries)
        return audit(
            config,
            decide,
            canaries=options.canaries,
            guesses=guesses,
            confidence=options.confidence,
        )
    finally:
        logger.setLevel(level)
        del lock


def _publish(folder: str, result: dict[str, Any]) -> None:
    """Write the result beside the audited weights, and print the cost of publishing it."""
    text = json.dumps(result, indent=2) + "\n"
    write_atomically(os.path.join(folder, RESULT_FILE), text.encode())
    spent = read_published_fields(folder)
    assert spent is not None
    cost = spent["epsilon_executed"]
    price = "has no epsilon" if cost is None else f"spends epsilon = {rounded_up(cost)}"
    for line in (
        f"publishing this result {price} on the records; python -m torchtitan_dp.ledger adds it "
        f"up, from {folder}/",
        "the weights there are not private, for good: delete them",
    ):
        print(f"audit: {line}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
