"""The plan's word on the hosts' memory, and the start that it refuses."""

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.processes.runs import arguments, write_records

GIB = 2**30
OFFLOAD = ("--activation_checkpoint.mode=full", "--activation_checkpoint.offload_inputs")
HOST = "host memory (predicted): "


@pytest.fixture(autouse=True)
def machine(monkeypatch, own_cache):
    """A machine that has 4 GiB left."""
    monkeypatch.setattr(plan, "available_bytes", lambda: 4 * GIB)


def host_line(said):
    (line,) = (line.strip() for line in said.splitlines() if HOST in line)
    return line


def test_a_node_of_the_plan_has_up_to_eight_ranks(plan_tiny):
    """4 blocks of 16,384 / cp tokens of 192 values in fp32, each of a power of two."""
    tokens = "--training.seq_len=16384"
    said, content = plan_tiny(16, *OFFLOAD, tokens, "--parallelism.context_parallel_degree=2")
    of_node = {"node_gib": 8 * 32 / 1024, "node_ranks": 8}
    assert content["host_memory"] == {"inputs_gib": 32 / 1024, "save_gib": 0.0} | of_node
    assert host_line(said) == (
        f"{HOST}0.03 GiB a rank for inputs of blocks, 0.00 to save beside the run; 0.25 GiB for 8 "
        "ranks of a node; not counted: what each process takes by itself, some GiB"
    )
    said, content = plan_tiny(2, *OFFLOAD, tokens)
    assert (content["host_memory"]["node_ranks"], "for 2 ranks of a node" in said) == (2, True)


LONG = ("--training.seq_len=4194304", "--training.steps=1")


@pytest.fixture
def command(tmp_path):
    return arguments(tmp_path / "out", write_records(tmp_path / "data"), *OFFLOAD, *LONG)


@pytest.mark.parametrize("private", ["--privacy.enable", "--privacy.no-enable"])
def test_the_plan_of_a_start_refuses_what_this_machine_lacks(command, capsys, private):
    """16 GiB in all, of which this machine has 4; a plan for another machine refuses nothing."""
    given = [*command, private, "--world_size=4"]
    plan.main(given)
    assert "16.00 GiB for 4 ranks of a node" in capsys.readouterr().out
    plan.main([*given, "--ranks_here=1"])
    said = capsys.readouterr().err
    assert "4.00 GiB for 1 ranks of a node; this machine has 4.00 GiB left" in said
    with pytest.raises(SystemExit) as stopped:
        plan.main([*given, "--ranks_here=2"])
    assert stopped.value.code == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("error"))
    assert line.startswith("error: activation_checkpoint.offload_inputs = true: 2 ranks of a node ")


@pytest.mark.parametrize("given", ["0", "-1", "5"])
def test_ranks_here_are_some_of_the_run(command, capsys, given):
    with pytest.raises(SystemExit) as stopped:
        plan.main([*command, "--world_size=4", f"--ranks_here={given}"])
    assert stopped.value.code == 2
    assert f"error: --ranks_here = {given}: must be 1 to 4, all" in capsys.readouterr().err
