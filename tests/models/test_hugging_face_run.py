"""Real runs that start from a Hugging Face folder and end in one; resumed on another mesh."""

import shutil

import pytest
import torch

from tests.models.hugging_face import SCALED, transformers_logits, write_llama
from tests.processes.runs import arguments, load, train, with_sigma, write_records

FROM_HF = (
    "--checkpoint.initial_load_in_hf",
    "--checkpoint.last_save_in_hf",
    "--privacy.initial_weights_public",
)


def mesh(shard, cp):
    return (
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.context_parallel_degree={cp}",
    )


def command(place, llama, *overrides):
    """A private run of fp32 compute in the folder `place/out`."""
    data = place / "data"
    if not data.exists():
        write_records(data)
    hf = f"--model.hf_assets_path={llama}"
    return arguments(place / "out", data, hf, *FROM_HF, *with_sigma(1), *overrides)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tied") / "given", tied=True, rope=SCALED, eps=1e-6)


@pytest.fixture(scope="module")
def on_cp_4(tied, tmp_path_factory):
    """Four steps from the tied folder, at cp 4: its command and its place."""
    place = tmp_path_factory.mktemp("cp4")
    overrides = command(place, tied, "--privacy.debug_seed=1")
    train([*overrides, *mesh(1, 4)], log=place / "log", world_size=4)
    return overrides, place / "out"


def test_a_tied_weight_has_one_optimizer_state(on_cp_4):
    state = load(on_cp_4[1] / "checkpoint" / "step-4")
    assert torch.equal(state["model.lm_head.weight"], state["model.model.embed_tokens.weight"])
    assert "optimizer.state.model.model.embed_tokens.weight.exp_avg" in state
    assert not [key for key in state if key.startswith("optimizer.") and "output" in key]


@pytest.mark.thorough
def test_saved_at_cp_4_resumed_at_cp_2_dp_shard_2(on_cp_4, tied, tmp_path):
    """The step-4 weights, moments and logits are those of the run that was not interrupted."""
    overrides, original = on_cp_4
    out = shutil.copytree(original, tmp_path / "out")
    shutil.rmtree(out / "checkpoint" / "step-4")
    shutil.rmtree(out / "hf")
    resumed = [*overrides, f"--job.dump_folder={out}", *mesh(2, 2)]
    assert "Training starts at step 3" in train(resumed, log=tmp_path / "log", world_size=4)

    before, expected, found = (
        load(folder / "checkpoint" / step)
        for folder, step in ((out, "step-2"), (original, "step-4"), (out, "step-4"))
    )
    for key in expected:
        if key.endswith(("weight", "exp_avg")):
            change = (expected[key] - before[key]).norm()
            assert change > 0, key
            assert (found[key] - expected[key]).norm() < 1e-3 * change, key
    logits = transformers_logits(out / "hf")
    moved = (transformers_logits(tied) - logits).abs().max()
    assert moved > 0.1
    assert (transformers_logits(original / "hf") - logits).abs().max() < 1e-3 * moved
