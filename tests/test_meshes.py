"""With `privacy.debug_seed`, a private run is the same run on every mesh (row 12): whole runs of
three noisy steps in fp32 have the same draws and noise, so that the weights' change agrees."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.processes.runs import arguments, train, with_sigma, write_records

MESHES = {  # dp_replicate, dp_shard, cp
    "cp1": (1, 1, 1),
    "cp2": (1, 1, 2),
    "cp4": (1, 1, 4),
    "cp2_dp_shard2": (1, 2, 2),
    "cp2_dp_replicate2": (2, 1, 2),
}


def weights_after_three_steps(
    folder: Path,
    degrees: tuple[int, int, int],
    *more: str,
    data: Path | None = None,
    env: dict[str, str] | None = None,
):
    replicate, shard, cp = degrees
    world_size = replicate * shard * cp
    overrides = arguments(
        folder / "out",
        data or write_records(folder / "data"),
        *("--training.steps=3", "--training.global_batch_size=4", "--checkpoint.interval=3"),
        *with_sigma(0.5),
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.context_parallel_degree={cp}",
        *more,
    )
    train(overrides, log=folder / "log", world_size=world_size, env=env)
    return read_weights(folder / "out/checkpoint/step-3")


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Whole parameters, by name."""
    tensors = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size)
        for name, entry in tensors.items()
        if hasattr(entry, "size") and not name.startswith("optimizer.")
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def initial_weights() -> dict[str, torch.Tensor]:
    from torchtitan_dp.models.causal_lm.model import CausalLM
    from torchtitan_dp.models.hugging_face import flavor

    model = CausalLM(flavor("debug"))
    model.init_weights()
    return dict(model.named_parameters())


def change(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    start = initial_weights()
    assert weights.keys() == start.keys()
    with torch.no_grad():
        return torch.cat([(weights[n] - start[n]).flatten() for n in sorted(start)])


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> torch.Tensor:
    """The change on one rank."""
    folder = tmp_path_factory.mktemp("cp1")
    return change(weights_after_three_steps(folder, MESHES["cp1"], "--privacy.debug_seed=1"))


@pytest.mark.thorough_cases("cp2", "cp2_dp_replicate2", "cp4")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "cp1"])
def test_row12_the_weights_change_alike_on_every_mesh(tmp_path, one, mesh):
    other = change(weights_after_three_steps(tmp_path, MESHES[mesh], "--privacy.debug_seed=1"))
    assert one.norm() > 0.1
    error = ((other - one).norm() / one.norm()).item()
    print(mesh, error)
    assert error < 1e-3
