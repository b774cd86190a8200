"""Attack the trainer, and report a lower bound on how much it leaks.

    torchtitan-dp audit --job.config_file FILE [--section.key value …]
        [--instrument game|text] [--trials N] [--canaries N] [--json FILE]

In one plain process, or in several under torchrun. `game` plays single steps of a tiny model on the
configuration's terms (`audit.game`); `text` trains the configured model once, in a folder of its
own, on the records and on canaries of text, and attacks nothing but the exported model
(`audit.released`). Exit code 1 if more leaks than is claimed, 2 for a user's mistake.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("audit", __doc__)

# isort: split
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.audit import released
from torchtitan_dp.audit.game import CONFIDENCE_OF_CASE, Game
from torchtitan_dp.base.process import forbid_core_dumps, lock_folder, write_atomically
from torchtitan_dp.checkpoint.start import decision, plan_start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import exit_on_mistake, load_config, results, write_json
from torchtitan_dp.distributed.agreement import join_ranks, shared_root_key
from torchtitan_dp.ledger import PRIVACY_FILE, RunLog
from torchtitan_dp.ledger.schema import read_published_fields
from torchtitan_dp.models.causal_lm.settings import lora_of
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.lower_bounds import claimed_mu, expected_mu
from torchtitan_dp.privacy.meaning import templates
from torchtitan_dp.privacy.segments import Mechanism
from torchtitan_dp.train.check import check_model, open_records
from torchtitan_dp.train.spec import quiet, register

RESULT_FILE = "audit.json"


def main(argv: list[str]) -> None:
    options, overrides = parsed("audit", __doc__, argv)
    forbid_core_dumps()
    os.umask(0o077)
    is_game = options.instrument == "game"
    with exit_on_mistake():
        for name in ("trials", "canaries"):
            if (count := getattr(options, name)) < 10:
                raise ValueError(f"--{name} = {count}: must be at least 10")
        config = load_config(overrides, int(os.environ.get("WORLD_SIZE", "1")))
        if not config.privacy.enable:
            raise ValueError("privacy.enable = false: nothing is claimed; set it to true")
        if is_game:  # no step of any run: a folder that is never made
            config.job.dump_folder = config.job.dump_folder.rstrip("/") + "_game"
        else:
            prepare_run(config)
        decide = decision(config)
        check_model(config, decide())
        plan = plan_start(config, len(open_records(config).train), decide(), None)
        if is_game:
            check_power(plan.settings.mechanism, options.trials)
    device = join_ranks()
    if is_game:
        game = Game(
            config.privacy,
            plan.settings.mechanism,
            batch_size=config.training.local_batch_size,
            degrees=mesh_degrees(config),
            root=shared_root_key(device, config.privacy.debug_seed),
            lora=lora_of(config),
        )
        result = game.play_all(trials=options.trials, delta=plan.settings.delta)
    else:
        register(config, decide=decide)
        lock = lock_folder(config.job.dump_folder) if dist.get_rank() == 0 else None
        quiet(logger)
        result = released.audit(config, decide, canaries=options.canaries)
        del lock
    if dist.get_rank() == 0:
        if not is_game:
            _publish(config.job.dump_folder, result)
        text = templates(Path(__file__).parent).get_template("result.txt.j2").render(result)
        print(text, end="", file=results(options.json))
        if options.json:
            write_json(options.json, result)
    dist.destroy_process_group()
    if result["exceeds_claim"]:
        raise SystemExit(1)


def check_power(mechanism: Mechanism, trials: int) -> None:
    """Refuse, by ValueError, a game that could not detect half of the noise."""
    sigma, each = mechanism.noise_multiplier, CONFIDENCE_OF_CASE
    if sigma == 0:
        raise ValueError("privacy.noise_multiplier = 0: nothing is claimed; give it noise")
    if expected_mu(2 / sigma, trials, each) <= claimed_mu(mechanism, trials, each):
        raise ValueError(
            f"--trials = {trials}: too few to prove sigma = {sigma:.4g}; raise it, or audit "
            "other noise (--privacy.target_epsilon None --privacy.noise_multiplier 1)"
        )


def prepare_run(config: JobConfig) -> None:
    """Make `config` the audited run's, in place: a folder of its own, no output but the weights.

    Raises:
        ValueError: a run lives in that folder, canaries do not fit the noise, or no library here
            can load the export.
    """
    if config.privacy.noise == "banded":
        raise ValueError("privacy.noise = 'banded': canaries have no group; use --instrument game")
    adapts = config.lora.rank > 0 and config.lora.export == "adapter"
    if adapts and importlib.util.find_spec("peft") is None:
        raise ValueError("lora.export = 'adapter': this needs peft; install it, or use 'merged'")
    folder = config.job.dump_folder.rstrip("/") + "_audit"
    if os.path.exists(os.path.join(folder, PRIVACY_FILE)) or RunLog(folder).count > 0:
        raise ValueError(f"job.dump_folder: {folder} has a run already; name another")
    config.job.dump_folder = folder
    config.validation.enable = False
    config.validation.publish_epsilon = config.validation.publish_delta = None
    config.metrics.enable_tensorboard = False
    config.metrics.enable_wandb = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False
    config.checkpoint.enable = config.checkpoint.initial_load_in_hf
    config.checkpoint.last_save_in_hf = False


def _publish(folder: str, result: dict[str, Any]) -> None:
    """Write the result beside the audited weights, and print the cost of publishing it."""
    text = json.dumps(result, indent=2) + "\n"
    write_atomically(os.path.join(folder, RESULT_FILE), text.encode())
    spent = read_published_fields(folder)
    assert spent is not None
    cost = spent["epsilon_executed"]
    price = "has no epsilon" if cost is None else f"spends epsilon = {rounded_up(cost)}"
    print(
        f"audit: publishing this result {price} on the records; torchtitan-dp ledger "
        f"adds it up, from {folder}/\n"
        "audit: the weights there are not private, for good: delete them",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
