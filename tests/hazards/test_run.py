"""Rows that only a whole run shows: what its files hold, what its steps count. The tests share one
run, `probed`: torchrun starts this file as a script, training with known secrets, for a search."""

import hmac
import json
import os
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import forks
from tests.processes.runs import arguments, load, privacy, train, weights, with_sigma, write_records
from torchtitan_dp.ledger import schema
from torchtitan_dp.train.outlets import find

STEPS = 4
SECRET = bytes(range(101, 133))  # what `RootKey.from_os` gives in `probed`


# --- runs -----------------------------------------------------------------------------------------


def main(argv):
    """Train with known secrets, a smaller model."""
    from torchtitan_dp.models.hugging_face import FLAVORS
    from torchtitan_dp.privacy.keys import RootKey
    from torchtitan_dp.train import trainer as train

    FLAVORS["debug"] |= {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 1}
    RootKey.from_os = classmethod(lambda cls: cls(SECRET))
    train.main(argv)


class Finished:
    """A run to the end and what it left."""

    def __init__(self, place, output):
        self.place, self.out, self.output = place, place / "out", output
        self.spent = privacy(self.out)

    def checkpoint(self, step=STEPS):
        return self.out / "checkpoint" / f"step-{step}"

    def scalars(self):
        """Tag -> {step: value}, over all TensorBoard files."""
        found = {}
        for folder in {path.parent for path in (self.out / "tb").rglob("events.*")}:
            events = EventAccumulator(str(folder)).Reload()
            for tag in events.Tags()["scalars"]:
                found.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
        return found


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    place = tmp_path_factory.mktemp("probed")
    data = write_records(place / "data", count=16)
    # Undecodable: contributes 0, is counted. Its name's hash keeps it among the trained ones.
    (data / "binary_1.txt").write_bytes(b"\xff\xfe\xff")
    (place / "tmp").mkdir()
    output = train(
        arguments(
            place / "out",
            data,
            "--privacy.sample_rate=1",  # all records at every step
            "--data.heldout_fraction=0.3",
            "--validation.enable",
            "--validation.freq=2",
            "--validation.steps=2",
        ),
        log=place / "log",
        program=(__file__,),
        env={"TMPDIR": str(place / "tmp")},
    )
    return Finished(place, output)


# --- keys and noise -------------------------------------------------------------------------------


def spellings(key):
    """How a key could lie in a file: whole or as 8-byte words; raw, hex or decimal."""
    words = [key, key[:16], key[16:], *(key[i : i + 8] for i in range(0, len(key), 8))]
    for word in filter(None, words):  # a cipher's key has 16 bytes
        for turned in (word, word[::-1]):
            number = int.from_bytes(turned, "big")
            yield turned
            yield turned.hex().encode()
            yield turned.hex().upper().encode()
            yield str(number).encode()
            yield str(number - 2 ** (8 * len(turned))).encode()  # as a signed word


def derived(steps):
    """The root key and all keys that follow from it in `steps` steps."""
    yield SECRET
    for label in (b"sampling", b"noise"):
        stream = hmac.digest(SECRET, label, "sha256")
        yield stream
        for step in range(steps + 1):
            yield hmac.digest(stream, step.to_bytes(8, "big"), "sha256")


def leaks(folders, keys):
    """Files that hold a spelling of a key."""
    needles = {spelling for key in keys for spelling in spellings(key)}
    assert min(map(len, needles)) >= 8  # shorter ones would occur by chance
    pattern = re.compile(b"|".join(map(re.escape, sorted(needles, key=len, reverse=True))))
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".gch"  # PyTorch's headers, compiled: 150 MB
    ]
    return files, [path for path in files if pattern.search(path.read_bytes())]


def test_hazard_30_no_file_holds_a_key(probed):
    folders = [probed.out, probed.place / "tmp", probed.place / "cache"]
    (probed.out / "console.log").write_text(probed.output)
    files, leaking = leaks(folders, derived(STEPS))
    names = " ".join(map(str, files))
    for expected in ("privacy.json", ".distcp", "events.out", "steps_executed.log"):
        assert expected in names, f"nothing like {expected} was searched"
    assert leaking == []


def compiled_noise(folder):
    """Noise as CUDA draws it, compiled into `folder`: the one code with a key that is compiled."""
    os.environ.update(
        TMPDIR=f"{folder}/tmp",
        TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",  # of a single kernel
    )
    from torchtitan_dp.privacy import noise

    *_, key = derived(STEPS)
    flat = torch.zeros(1000)
    with mock.patch.object(noise, "_add_normal", noise.compile_kernel(noise._add_normal)):
        noise._add_threefry(flat, 1.0, noise.threefry_key(key, "w", "cpu"), start=5)
    return flat.std().item()


@pytest.mark.thorough
@pytest.mark.slow
def test_hazard_30_no_compile_cache_holds_a_key(tmp_path):
    from torchtitan_dp.privacy.noise import cipher_key

    for name in ("tmp", "inductor"):
        (tmp_path / name).mkdir()
    assert forks.call(compiled_noise, tmp_path) == pytest.approx(1, abs=0.2)
    *_, key = derived(STEPS)
    files, leaking = leaks([tmp_path], [*derived(STEPS), cipher_key(key, "threefry4x32", "w")])
    assert any(path.suffix == ".cpp" for path in files), "nothing was compiled"
    assert leaking == []


@pytest.mark.parametrize("spell", [bytes, bytes.hex, lambda key: int.from_bytes(key, "big")])
def test_hazard_30_search_finds_what_it_must(tmp_path, spell):
    """A key of a step, in the middle of a file, in each spelling."""
    *_, key = derived(STEPS)
    for part in (key, key[8:16]):
        told = spell(part)
        (tmp_path / "file").write_bytes(
            b"\x00seed=" + (told if isinstance(told, bytes) else str(told).encode()) + b";\xff"
        )
        assert leaks([tmp_path], derived(STEPS))[1] == [tmp_path / "file"]


# --- steps ----------------------------------------------------------------------------------------


def test_hazard_21_the_ledger_counts_optimizer_steps(probed):
    """Of a dozen microbatches a step: AdamW's own count is the ledger's."""
    run = probed
    assert all(count > 6 for count in run.scalars()["not_private/realized_batch_size"].values())
    state = load(run.checkpoint())
    counts = {v.item() for k, v in state.items() if re.fullmatch(r"optimizer\.state\..*\.step", k)}
    assert counts == {STEPS}
    assert run.spent["steps"] == run.spent["steps_executed"] == STEPS
    assert json.loads(state["train_state.ledger"])["steps"] == STEPS
    lines = (run.out / "steps_executed.log").read_text().splitlines()
    assert lines == [f"{step}" for step in range(1, STEPS + 1)]
    start = json.loads(state["train_state.ledger"])["start"]
    assert (run.out / "starts.log").read_text().split()[1] == start
    assert start not in (run.out / "privacy.json").read_text()


# --- what is published ----------------------------------------------------------------------------


def test_hazard_24_console_lines_are_labelled(probed):
    """What is computed from records comes after the label, on a line that has one."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", probed.output)
    private = re.compile(r"\b(loss|batch|clipped|norm p50|memory|tps): ")
    told = [line for line in plain.splitlines() if re.search(r"step: +[0-9]", line)]
    assert len([line for line in told if "epsilon: " in line and "[rank0]" in line]) == STEPS
    for line in told:
        label, found = line.find("not private:"), private.search(line)
        assert found is None or -1 < label < found.start(), line


def test_hazard_24_privacy_json_holds_the_schema_alone(probed):
    correlated = ("bands", "column", "round_steps")  # of another mechanism
    of_a_run = [key.name for key in schema.KEYS if key.in_runs]
    assert list(probed.spent) == [key for key in of_a_run if key not in correlated]
    of_records = r"(?<!heldout_)loss|norm(?!_multiplier|_estimator)|token|record|seen|drawn|realiz"
    assert [key for key in probed.spent if re.search(of_records, key)] == ["max_grad_norm"]


# --- checkpoints ----------------------------------------------------------------------------------

PARAMETER = (
    r"model\.(lm_head|model\.(embed_tokens|norm|layers\.\d+\.(self_attn\.[qkvo]_proj"
    r"|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm)))\.weight"
)
ALLOWED = (
    PARAMETER,
    rf"optimizer\.state\.{PARAMETER}\.(exp_avg|exp_avg_sq|step)",
    rf"optimizer\.param_groups\.{PARAMETER}\.(lr|betas|eps|weight_decay|amsgrad|maximize|foreach"
    r"|capturable|differentiable|fused|decoupled_weight_decay|initial_lr)",
    r"lr_scheduler\.(base_lrs|last_epoch|_step_count|_is_initial|_get_lr_called_within_step"
    r"|_last_lr)",
    r"train_state\.(step|ntokens_seen|ledger)",
    "model_settings",
)


@pytest.mark.parametrize("step", [2, STEPS])
def test_hazard_44_checkpoint_keys_are_allowed_ones(probed, step):
    keys = dcp.FileSystemReader(probed.checkpoint(step)).read_metadata().state_dict_metadata
    assert [k for k in keys if not any(re.fullmatch(rule, k) for rule in ALLOWED)] == []
    for rule in ALLOWED:  # none is there for nothing
        assert any(re.fullmatch(rule, k) for k in keys), rule


if __name__ == "__main__":
    main(sys.argv[1:])


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A plain run in which no record is ever drawn."""
    place = tmp_path_factory.mktemp("empty")
    output = train(
        arguments(
            place / "out",
            write_records(place / "data"),
            *with_sigma(1),
            "--privacy.sample_rate=1e-10",
            "--privacy.delta=1e-12",  # below sample_rate / global_batch_size
            "--training.global_batch_size=7",
        ),
        log=place / "log",
        world_size=1,
    )
    return Finished(place, output)


def test_hazard_16_an_empty_draw_is_a_step(empty):
    run, scalars = empty, empty.scalars()
    assert scalars["not_private/realized_batch_size"] == {s: 0.0 for s in range(1, STEPS + 1)}
    before, after = weights(run.checkpoint(2)), weights(run.checkpoint(4))
    for name, weight in before.items():
        moved = (weight != after[name]).float().mean().item()
        # A norm's weights are 192 near 1, of which one comes back to the same fp32 number with
        # 1e-5: two of them would be 1%. Without the step, none moves.
        assert moved > 0.9, f"{name}: {moved:.2%} of it moved"
    epsilons = [scalars["private_to_publish/epsilon"][step] for step in range(1, STEPS + 1)]
    assert epsilons == sorted(epsilons)
    assert run.spent["steps"] == STEPS
    assert run.spent["epsilon"] > 0


def test_hazard_24_tags_are_labelled(probed):
    tags = set(probed.scalars())
    public = {t for t in tags if not t.startswith("not_private/")}
    names = ("lr", "epsilon", "noise_multiplier")
    assert public == {f"private_to_publish/{name}" for name in names}
    assert [tag for tag in tags if find(tag.partition("/")[2]) is None] == []
    for tag in ("loss", "realized_batch_size", "clipped_fraction", "norm_p50", "throughput(tps)"):
        assert f"not_private/{tag}" in tags
