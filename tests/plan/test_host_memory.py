"""The plan's word on the hosts' memory, and the start that it refuses."""

from pathlib import Path
from unittest import mock

import pytest

import torchtitan_dp.plan.__main__ as plan
import torchtitan_dp.plan.report as plan_report
from tests.processes.runs import ROOT, arguments, write_records
from torchtitan_dp import launch

DEBUG = ROOT / "train_configs/llama3_debug.toml"

GIB = 2**30
OFFLOAD = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")
HOST = "host memory (predicted): "


@pytest.fixture(autouse=True)
def machine(monkeypatch, own_cache):
    """A machine that has 3 GiB left."""
    monkeypatch.setattr(plan_report, "available_bytes", lambda: 3 * GIB)


def host_line(said):
    (line,) = (line.strip() for line in said.splitlines() if HOST in line)
    return line


def test_a_node_of_the_plan_has_up_to_eight_ranks(plan_tiny):
    """4 blocks of 16,384 / cp tokens of 192 values in fp32: 12 MiB over all ranks of cp."""
    tokens = "--training.seq_len=16384"
    said, content = plan_tiny(16, *OFFLOAD, tokens, "--parallelism.context_parallel_degree=2")
    assert content["host_memory"] == {
        "inputs_gib": 24 / 1024,
        "save_gib": 0.0,
        "rank_gib": 24 / 1024,
        "node_gib": 8 * 24 / 1024,
        "node_ranks": 8,
        "node_ranks_assumed": True,
    }
    assert host_line(said) == (
        f"{HOST}0.02 GiB a rank (page-locked inputs of 4 blocks, 0.01 each), 0.19 GiB for a "
        "node's 8 ranks (assumed: all, up to 8); this machine has 3.00 GiB left; not counted: "
        "what each process takes by itself, some GiB"
    )
    said, content = plan_tiny(2, *OFFLOAD, tokens)
    assert (content["host_memory"]["node_ranks"], "a node's 2 ranks" in said) == (2, True)


@pytest.mark.parametrize("options", [(), ("--checkpoint.enable", "--checkpoint.async_mode=async")])
def test_what_the_host_keeps_is_said_from_a_gib_on(plan_tiny, options):
    said, content = plan_tiny(1, *options)
    assert HOST not in said
    saved = 12 * 1_872_576 / GIB if options else 0
    assert content["host_memory"]["save_gib"] == pytest.approx(saved)


LONG = ("--training.seq_len=4194304", "--training.steps=1")


@pytest.fixture
def command(tmp_path):
    return arguments(tmp_path / "out", write_records(tmp_path / "data"), *OFFLOAD, *LONG)


@pytest.mark.parametrize("private", ["--privacy.enable", "--privacy.no-enable"])
def test_the_plan_of_a_start_refuses_what_this_machine_lacks(command, capsys, private):
    """12 GiB in all, of which this machine has 3; a plan for another machine refuses nothing."""
    given = [*command, private, "--world_size=4"]
    plan.main(given)
    assert "12.00 GiB for a node's 4 ranks (assumed: all, up to 8)" in capsys.readouterr().err
    plan.main([*given, "--ranks_here=1"])
    said = capsys.readouterr().err
    assert "3.00 GiB for a node's 1 rank; this machine has 3.00 GiB left" in said
    with pytest.raises(SystemExit) as stopped:
        plan.main([*given, "--ranks_here=2"])
    assert stopped.value.code == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("error"))
    assert line.startswith("error: activation_checkpoint.offload_inputs = true: the 2 ranks of a ")


@pytest.mark.parametrize("given", ["0", "-1", "5"])
def test_ranks_here_are_some_of_the_run(command, capsys, given):
    with pytest.raises(SystemExit) as stopped:
        plan.main([*command, "--world_size=4", f"--ranks_here={given}"])
    assert stopped.value.code == 2
    assert f"error: --ranks_here = {given}: must be from 1 to 4, all" in capsys.readouterr().err


def test_the_launcher_says_how_many_ranks_start_here():
    with (
        mock.patch.object(launch, "_run_plan", side_effect=SystemExit(2)) as planned,
        mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""),
        pytest.raises(SystemExit),
    ):
        launch._checked("2", ["-m", "torchtitan_dp.train", f"--job.config_file={DEBUG}"])
    (given,) = planned.call_args.args
    assert given[:4] == ["--world_size", "2", "--ranks_here", "2"]


def test_slurms_script_says_how_many_ranks_a_node_starts():
    text = (Path(__file__).parents[2] / "scripts/slurm/train.sbatch").read_text()
    assert '--world_size "$((nodes * NGPU))" --ranks_here "$NGPU" "$@"' in text
