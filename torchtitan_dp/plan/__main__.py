"""The plan of a run: its epsilon, samples, noise, cost and memory, before anything is started.

    python -m torchtitan_dp.plan --job.config_file FILE [--section.key value …] [--world_size N]
                                 [--ranks_here R] [--memory_gib G] [--json FILE] [--recommend]
                                 [--machine M [--choose [--write TOML]]]
    torchrun --nproc_per_node N -m torchtitan_dp.plan --calibrate FILE

Checks everything that one process can check: `run_train.sh` runs it first. A user's mistake is one
line and exit code 2. A prediction of memory (`memory`) takes longer, and is made with
`--memory_gib` (then a run that does not fit is a mistake too), or `--json`. The share of noise in
an update is always shown (`signal`), and the memory of hosts if it is large; `--ranks_here`, which
each start gives, compares that with this machine's. `--recommend` compares batches and steps.
`--machine` predicts seconds (`seconds`), and `--choose` the fastest mesh, checkpointing and method
that fit. `--calibrate` measures the machine that it runs on.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from torchtitan_dp.config.commands import first, parsed

if __name__ == "__main__":  # before PyTorch, which takes seconds to import
    first("plan", __doc__)

# isort: split
import torch
import torch.distributed as dist

from torchtitan_dp.config.load import (
    exit_on_mistake,
    load_config,
    seeks_fewest_ranks,
    write_json,
)
from torchtitan_dp.distributed.devices import cuda_devices, device_name, memory_bytes
from torchtitan_dp.distributed.host_memory import available_bytes
from torchtitan_dp.plan.calibration import calibrate
from torchtitan_dp.plan.choose import Draws, choose, fewest_ranks, show_choices, write
from torchtitan_dp.plan.machines import MACHINES, Machine, machine_named
from torchtitan_dp.plan.memory import DEFAULT_GIB, GIB, predict, predicting, show_memory
from torchtitan_dp.plan.recommend import refuse
from torchtitan_dp.plan.report import for_programs, make_report, show
from torchtitan_dp.selfcheck.run import start


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
        raise ValueError(
            f"--ranks_here = {options.ranks_here}: must be from 1 to {text}, all ranks"
        )
    return int(text)


def main(argv: list[str]) -> list[str]:
    """Plan; return what it has found of the configuration, for the command line of a start."""
    options, overrides = parsed("plan", __doc__, argv)
    if options.calibrate:
        measure(options.calibrate)
        return []
    with exit_on_mistake():
        world_size = world_size_of(options)
        machine = machine_of(options, world_size)
        config = load_config(overrides, world_size)
        if options.recommend:
            refuse(config)
    asked = options.memory_gib is not None or options.json
    predicts = asked and config.privacy.enable and not options.no_memory and not options.choose
    memory_gib = options.memory_gib or (machine.memory_gib if machine else DEFAULT_GIB)
    # Kept noise takes memory, and how many bands `auto` is, follows from the report.
    waits = config.privacy.noise == "banded" and config.privacy.bands == "auto"
    seeks = predicts or options.ranks_here or (machine and not options.choose)
    can_seek = world_size > 1 and config.privacy.enable and not waits
    found = list[str]()
    if seeks and can_seek and seeks_fewest_ranks(overrides):
        with exit_on_mistake():
            found = ranks_a_sample(overrides, world_size, memory_gib, options.ranks_here)
            overrides = [*overrides, *found]
            config = load_config(overrides, world_size)
    at_once = predicts and not waits
    beside = predicting(overrides, world_size, memory_gib) if at_once else nullcontext()
    with beside as predicted:
        with exit_on_mistake():
            report = make_report(
                config,
                world_size,
                ranks_here=options.ranks_here,
                units=options.units,
                recommends=options.recommend,
            )
        show(report)
        if report.spent is None:
            if asked or machine:
                print("      nothing more is predicted without privacy", file=sys.stderr)
            return found
        settings, choices = report.spent.plan.settings, None
        if waits:
            overrides = [*overrides, f"--privacy.bands={settings.bands}"]
        if machine is not None:
            draws = Draws(settings.implied_units, settings.mechanism.sample_rate)
            with exit_on_mistake():
                choices = choose(
                    overrides, world_size, machine, memory_gib, draws, given=not options.choose
                )
            show_choices(choices, config.training.steps, machine)
        memory = predicted() if predicted else None
        if predicts and waits:
            memory = predict(overrides, world_size, memory_gib)
    if options.write and choices:
        with exit_on_mistake():
            write(options.write, config.job.config_file, choices[0].keys)
    if options.json:
        write_json(options.json, for_programs(report, report.spent, memory, choices))
    if memory is not None:
        with exit_on_mistake():
            show_memory(memory, config, limited=options.memory_gib is not None)
    return found


def machine_of(options: argparse.Namespace, world_size: int) -> Machine | None:
    """Return the machine that the options name, if any; ValueError, one line."""
    if options.machine is None:
        if options.choose:
            raise ValueError(f"--choose: needs --machine, one of {', '.join(MACHINES)} or a file")
        return None
    if options.write and not options.choose:
        raise ValueError(f"--write = '{options.write}': it writes what --choose finds; add that")
    found = machine_named(options.machine)
    if found.between is None and world_size > found.ranks_a_node:
        raise ValueError(
            f"--machine = '{options.machine}': it was measured on one node, ranks: "
            f"{found.ranks_a_node}; for --gpus {world_size} measure a node of as many (torchrun "
            f"--nproc_per_node {world_size} -m torchtitan_dp.plan --calibrate FILE), or name one "
            f"of {', '.join(MACHINES)}"
        )
    return found


def ranks_a_sample(
    overrides: list[str], world_size: int, memory_gib: float, ranks_here: int | None
) -> list[str]:
    """Choose `parallelism.context_parallel_degree`, of this machine's memory where the run starts
    here; warn, and leave it to all ranks, where nothing can be predicted."""
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


def measure(path: str) -> None:
    """Calibrate this machine with all of torchrun's ranks, and write the file."""
    ranks = start(None)
    is_cuda = ranks.device.type == "cuda"
    of_host = (available_bytes() or 0) // dist.get_world_size()
    gib = (memory_bytes(ranks.device)[1] if is_cuda else of_host) / GIB
    found = calibrate(ranks.device, device_name(ranks.device), gib)
    if dist.get_rank() == 0:
        write_json(path, dataclasses.asdict(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = main(sys.argv[1:])
    if "--ranks_here" in sys.argv:  # for the script that starts the run
        print(*chosen, sep="\n")
