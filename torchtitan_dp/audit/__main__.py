"""Attack the trainer, and report a lower bound on how much it leaks.

    python -m torchtitan_dp.audit --job.config_file FILE [--section.key value …]
        [--instrument game|canaries|text] [--canaries N] [--guesses F] [--trials N] [--confidence P]
        [--folder DIR] [--json FILE] [--plot FILE.png]

In one plain process, or in several under torchrun. `game` plays single steps of a tiny model on the
configuration's terms (`audit.game`); `canaries` trains the configured model once, in a folder of
its own, on the records and on canaries (`audit.one_run`); `text` does so with canaries of text, and
attacks nothing but the exported model (`audit.released`). Exit code 1 if more leaks than is
claimed, 2 for a user's mistake.
"""

import argparse
import importlib.util
import json
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

from torchtitan_dp.audit import command, one_run, released
from torchtitan_dp.audit.game import Game
from torchtitan_dp.audit.one_run import CanaryAudit
from torchtitan_dp.checkpoint.plan import Plan
from torchtitan_dp.checkpoint.start import Start, decision, plan_start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import exit_on_mistake, load_config, write_json
from torchtitan_dp.distributed.agreement import shared_root_key
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger import PRIVACY_FILE, ExecutedSteps
from torchtitan_dp.ledger.files import read_published_fields
from torchtitan_dp.models.lora import lora_of
from torchtitan_dp.preflight.check import check_model, open_records
from torchtitan_dp.preflight.console import quiet
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.process import forbid_core_dumps, lock_folder, write_atomically
from torchtitan_dp.train_spec import register

RESULT_FILE = "audit.json"


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
    config.validation.publish_epsilon = config.validation.publish_delta = None
    config.metrics.enable_tensorboard = False
    config.metrics.enable_wandb = config.metrics.enable_mlflow = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False
    loads = config.checkpoint.initial_load_path or config.checkpoint.initial_load_in_hf
    config.checkpoint.enable = bool(loads)
    config.checkpoint.last_save_in_hf = False


def require_libraries(config: JobConfig) -> None:
    """Refuse, by ValueError, an export that no library here can load."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "--instrument text: loads the exported model by transformers, which is missing here; "
            "pip install transformers"
        )
    adapts = config.lora.rank > 0 and config.lora.export == "adapter"
    if adapts and importlib.util.find_spec("peft") is None:
        raise ValueError(
            "lora.export = 'adapter': --instrument text loads it with peft; pip install peft, or "
            "set it to 'merged'"
        )


def main(argv: list[str]) -> None:
    options, overrides = command.parse(argv, (__doc__ or "").splitlines()[0])
    forbid_core_dumps()
    os.umask(0o077)
    with exit_on_mistake():
        command.check(options)
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
        if options.instrument != "game" and config.privacy.noise == "banded":
            raise ValueError(
                "privacy.noise = 'banded': a canary is in no group of units; audit it with "
                "--instrument game, or set it to 'independent'"
            )
        if options.instrument == "text":
            require_libraries(config)
        if options.instrument != "game":
            prepare_run(config, options.folder or config.job.dump_folder.rstrip("/") + "_audit")
        decide = decision(config)
        args = check_model(config, decide())
        records = open_records(config)
        plan = plan_start(config, len(records.train), decide(), None)
        if plan.settings.mechanism.noise_multiplier == 0 and options.instrument != "text":
            raise ValueError("privacy.noise_multiplier = 0: nothing is claimed; give it noise")
        command.check_power(options, args, plan.settings)
    _start_ranks()
    if options.instrument == "game":
        root = shared_root_key(torch.device(device_type), config.privacy.debug_seed)
        result = play_game(config, plan, root, trials=options.trials, confidence=options.confidence)
    else:
        canaries = train_with_canaries(options, config, decide)
        result = canaries.result
    if dist.get_rank() == 0:
        if options.instrument != "game":
            _publish(config.job.dump_folder, result)
        print("\n".join(command.table(result)), file=sys.stderr)
        if options.json:
            write_json(options.json, result)
        if options.plot and options.instrument == "game":
            command.plot_game(result, options.plot)
        elif options.plot:
            command.plot_canaries(canaries, options.plot)
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
    each = command.share_of(confidence)
    outcomes = [game.play(case, trials=trials, confidence=each) for case in game.cases]
    return command.game_for_programs(
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
    quiet(logger)
    try:
        guesses = round(options.guesses * options.canaries)
        audit = released.audit if options.instrument == "text" else one_run.audit
        return audit(
            config,
            decide,
            canaries=options.canaries,
            guesses=guesses,
            confidence=options.confidence,
        )
    finally:
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
