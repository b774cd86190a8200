"""The predicted time of a step, and the choice of a setting by it."""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests import build
from tests.processes import forks
from tests.processes.ranks import on_ranks
from torchtitan_dp.config.load import load_config, seeks_fewest_ranks
from torchtitan_dp.distributed import ring
from torchtitan_dp.distributed.attention import apply_ring_attention, configure_ring
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.gradients.operands import tiles
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan import calibration, choose, fake_step, machines
from torchtitan_dp.plan.__main__ import main
from torchtitan_dp.plan.cost import flops_of
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.machines import MACHINES, Link, Machine, machine_named
from torchtitan_dp.plan.peaks import Model
from torchtitan_dp.plan.seconds import StepSeconds, step_seconds, transfer_seconds
from torchtitan_dp.plan.work import GATHER, RING, Counting, Operation, StepWork, Transfer, Work

# isort: split
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ONES = {
    "products": ((0, 1e9),),
    "attention": ((0, 1e9),),
    "attention's backward": ((0, 1e9),),
    "memory": ((0, 1e9),),
    "new tensors": ((0, 1e9),),
    "noise": ((0, 1e9),),
}
NODE = Machine("ones", 80, 8, ONES, 0.0, Link(1e9, 0.0), Link(1e8, 0.0))
CP, H100 = "parallelism.context_parallel_degree", MACHINES["h100"]
ADDS = Machine("adds", 80, 8, ONES, 1e-3, Link(1e9, 0.0), overlaps=False)


def works(overrides: tuple[str, ...], ranks: int, layers: tuple[int, ...]) -> list[StepWork]:
    """Return the work of the debug model with so many layers."""
    found = []
    config = load_config([*LLAMA, *overrides], ranks)
    args = shape(config)
    counting = Counting()
    with fake_world(ranks, like_cuda=False, repeated=counting.repeated):
        for n_layers in layers:
            args.n_layers = n_layers
            model = Model(config, args, config.activation_checkpoint.mode, counting=counting)
            found.append(model.work(config.training.seq_len))
            model.close()
    return found


LLAMA = (
    "--model.name=llama3",
    "--model.flavor=debug",
    "--training.seq_len=512",
    "--activation_checkpoint.mode=none",
    "--training.global_batch_size=8",
    "--training.dataset_path=python-stdlib",
    "--privacy.noise_multiplier=1",
    "--privacy.delta=1e-5",
)
KINDS = {
    "one process": ((), 1),
    "a ring": (("--parallelism.context_parallel_degree=2",), 2),
    "recomputed": (("--activation_checkpoint.mode=full",), 1),
    "several samples": (("--training.local_batch_size=4",), 1),
    "sharded": (
        ("--parallelism.context_parallel_degree=1", "--parallelism.data_parallel_shard_degree=2"),
        2,
    ),
}


def totals(work: Work) -> dict[str, float]:
    """Add up how often, how many FLOPs and how many bytes, by kind."""
    found: dict[str, float] = {}
    for done, times in work.items():
        for name, value in (
            ("times", 1),
            ("bytes", done.bytes),
            ("flops", getattr(done, "flops", 0)),
        ):
            key = f"{done.kind} {name}"
            found[key] = found.get(key, 0) + times * value
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_few_layers_gives_that_of_more(kind):
    overrides, ranks = KINDS[kind]
    few, more, many = forks.call(works, overrides, ranks, (2, 3, 6))
    found = few.with_layers(more, (2, 3), 6)
    assert found.trained_values == many.trained_values
    for one, other in zip(found[:2], many[:2], strict=True):
        assert totals(one) == pytest.approx(totals(other), rel=1e-6)


def of_all_tiles(*terms):
    with mock.patch.object(fake_step, "_some_tiles", lambda _, *of: tiles(*of)):
        return works(*terms)


@pytest.mark.parametrize("family", [(), ("--lora.rank=2",)], ids=["all weights", "lora"])
def test_a_tile_stands_for_all_that_are_like_it(family):
    """Seven tiles of the feed-forward and of the loss head, the last one shorter."""
    tiled = "--training.feed_forward_chunk=80", "--training.loss_chunk_tokens=80"
    overrides = "--activation_checkpoint.mode=full", *tiled, *family
    some, every = (forks.call(of, overrides, 1, (4,)) for of in (works, of_all_tiles))
    assert some[0].microbatch == every[0].microbatch


@pytest.mark.parametrize("kind", ["one process", "several samples"])
def test_work_has_the_flops_of_the_closed_form(kind):
    overrides, ranks = KINDS[kind]
    (found,) = forks.call(works, overrides, ranks, (4,))
    config = load_config([*LLAMA, *overrides], ranks)
    args = shape(config)
    args.n_layers = 4
    counted = sum(done.flops * n for done, n in found.microbatch.items() if hasattr(done, "flops"))
    samples = config.training.local_batch_size
    assert counted == pytest.approx(samples * flops_of(config, args).total, rel=0.02)


def test_a_ring_sends_its_keys_and_fsdp2_its_weights():
    (found,) = forks.call(works, KINDS["a ring"][0], 2, (4,))
    sent = {}
    for done, times in found.microbatch.items():
        if isinstance(done, Transfer):
            assert (done.ranks, done.stride) == (2, 1)
            sent[done.kind] = sent.get(done.kind, 0) + done.bytes * times
    args = shape(load_config([*LLAMA, *KINDS["a ring"][0]], 2))
    # Keys and values of 256 tokens: in bf16 forward and again in backward, their gradients in fp32
    # all around. Four layers.
    values = 2 * 256 * args.n_kv_heads * args.head_dim
    assert sent[RING] == 4 * (2 * 2 + 2 * 4) * values
    assert sent.keys() == {RING, GATHER, "reduce_scatter", "all_reduce"}


def work(*done: Operation | Transfer) -> Work:
    return Work(float, {one: 1.0 for one in done})


NOTHING = Work(float)
PRODUCT = Operation("products", "float32", 10**9, 10**3)  # a second of arithmetic
ADDED = Operation("memory", "float32", 0, 5 * 10**8)  # half a second of traffic
READ = Operation("products", "float32", 10**3, 2 * 10**9)  # two seconds of traffic


def seconds(microbatch, update=NOTHING, machine=ADDS, rounds=1.0, groups=10, **terms):
    config = build.config(**terms)
    return step_seconds(StepWork(microbatch, update, 0), config, groups, rounds, machine)


def test_an_operation_takes_the_longer_of_arithmetic_and_traffic():
    found = seconds(work(PRODUCT, ADDED, READ))
    assert found.parts["products"] == pytest.approx(3)
    assert found.parts["memory"] == pytest.approx(0.5)
    assert found.total == pytest.approx(3.5 + 3e-3)  # and three launches
    assert found.limit == "products"


def test_a_step_is_its_microbatches_and_one_update():
    found = seconds(work(PRODUCT), work(ADDED), rounds=4)
    assert found.total == pytest.approx(4 * 1.001 + 0.501)
    assert found.hours(7200) == pytest.approx(2 * found.total)


GATHERED = Transfer(GATHER, 10**9, 8, 1)
PASSED = Transfer(RING, 4 * 10**8, 8, 1)
ATTENDED = Operation("attention", "float32", 10**9, 0)


def test_what_overlaps_counts_once_but_for_one_group():
    assert seconds(work(PRODUCT, GATHERED), machine=NODE).total == pytest.approx(1.1)
    assert seconds(work(ATTENDED, PASSED), machine=NODE).total == pytest.approx(1.0)
    assert seconds(work(PRODUCT, GATHERED, PASSED)).total == pytest.approx(2.401)


def test_kept_weights_are_gathered_once_a_step():
    kept = build.config("--parallelism.keep_weights_gathered")
    once = step_seconds(StepWork(work(PRODUCT, GATHERED), NOTHING, 0), kept, 10, 5.0, ADDS)
    assert once.total == pytest.approx(5 * 1.001 + 1)


@pytest.mark.parametrize(
    ("ranks", "stride", "kind", "expected"),
    [
        (8, 1, GATHER, 1.0),  # within a node
        (16, 1, GATHER, 10 / 8),  # eight links between nodes
        (2, 8, GATHER, 10.0),  # one rank a node
        (4, 4, GATHER, 10 / 2),
        (16, 1, RING, 10.0),  # one hop of a ring leaves the node
        (1, 1, GATHER, 0.0),
    ],
)
def test_a_collective_that_leaves_a_node_takes_the_slower_link(ranks, stride, kind, expected):
    assert transfer_seconds(Transfer(kind, 10**9, ranks, stride), NODE) == pytest.approx(expected)


def test_rates_between_two_sizes_lie_on_a_line_of_logarithms():
    machine = Machine("", 1, 1, {"memory": ((10.0, 1.0), (1000.0, 100.0))}, 0, Link(1, 0))
    rates = [machine.rate("memory", "float32", size) for size in (1, 10, 100, 1000, 1e9)]
    assert rates == pytest.approx([1, 1, 10, 100, 100])


def test_a_measured_machine_comes_back_from_its_file(tmp_path, capsys):
    path = str(tmp_path / "machine.json")
    forks.call(calibrate, path)
    found = machine_named(path)
    assert found.overlaps is False
    assert {name.split()[0] for name in found.rates} == {
        *("products", "attention", "attention's", "memory", "new", "noise")
    }
    assert all(rate > 0 for curve in found.rates.values() for _, rate in curve)
    assert found.within is None
    assert json.loads(Path(path).read_text()) == json.loads(json.dumps(asdict(found)))
    with pytest.raises(SystemExit) as ended:  # of one process
        main([f"--job.config_file={DEBUG}", "--gpus=2", f"--machine={path}"])
    assert ended.value.code == 2
    assert "measured on one node, ranks: 1;" in capsys.readouterr().err


class Once:
    """A clock of one call."""

    device = torch.device("cpu")

    def __call__(self, function, calls=1):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


DEBUG = "train_configs/llama3_debug.toml"
FAST = {name: ((0, 1e12),) for name in ONES}


def transfers(launch: float) -> dict[str, machines.Curve]:
    """Also checks that a trainer of this process attends as it did before."""
    mesh = init_device_mesh("cpu", (2,))
    configure_ring(Shard(balanced=True, at_once=True))
    attention = ScaledDotProductAttentionWrapper()
    apply_ring_attention([attention], mesh, cudnn=False)
    found = calibration._transfers(Once(), Machine("fast", 1, 2, FAST, launch, overlaps=False))
    with mock.patch.object(ring, "begin_all_gather", wraps=ring.begin_all_gather) as gather:
        attention(*torch.ones(3, 1, 2, 8, 16))
    assert gather.called
    return found


@pytest.mark.parametrize("launch", [0.0, 10.0])  # in 10 s an operation, a step takes less than that
def test_what_ranks_send_is_measured_by_size(launch):
    for found in on_ranks(2, transfers, launch):
        assert found.keys() == {RING, GATHER}
        for curve in found.values():
            sizes = [size for size, _ in curve]
            assert sizes == sorted(sizes)
            assert all(rate > 0 for _, rate in curve)
        machine = Machine("measured", 1, 2, FAST | found, 0.0)
        (smallest, slowest), *_ = found[GATHER]
        took = transfer_seconds(Transfer("all_reduce", 1, 2, 1), machine)
        assert took == pytest.approx(smallest / slowest)
        for size, rate in found[GATHER]:
            for kind in (GATHER, "reduce_scatter"):
                took = transfer_seconds(Transfer(kind, size, 2, 1), machine)
                assert took == pytest.approx(size / rate)


def calibrate(path: str) -> None:
    main([f"--calibrate={path}"])


@pytest.mark.parametrize("content", [None, "{", "{}", json.dumps({"name": "x"})])
def test_a_machine_that_is_none_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"--machine = .*neither one of h100.* nor a file"):
        machine_named(str(path))


def mesh(keys):
    return tuple(value for key, value in keys.items() if key.endswith("_degree"))


def test_meshes_share_samples_and_fill_nodes():
    config = build.config()
    for ranks in (1, 8, 16):
        found = [{mesh(keys) for keys in of} for of in choose.meshes(config, ranks, H100)]
        assert all(len(of) == 1 for of in found)
        meshes = set.union(*found)
        assert all(math.prod(degrees) == ranks for degrees in meshes)
        assert all(shard * cp <= max(8, cp) for _, shard, cp in meshes)
    assert (2, 8, 1) in meshes
    assert max(cp for *_, cp in meshes) == 8  # too few tokens for a ring between nodes


def test_a_setting_that_cannot_fit_or_win_is_not_predicted():
    """Ranks share memory and time evenly at best; other modes of activations say nothing."""
    none, full, _ = next(choose.meshes(build.config(), 1, H100))
    step = StepSeconds(8.0, 1.0, {})
    task = choose._Task([], 8, H100, 80.0, choose.Draws(8000, 0.1))

    def promising(cp, keys, *tried):
        return task.promising(keys | {CP: cp}, [choose.Choice(*one) for one in tried])

    assert promising(4, none, (none, 3.9, 1, step))
    assert not promising(4, none, (none, 4.1, 1, step))
    assert promising(4, none, (full, 4.1, 1, step))
    fits = [(full | {CP: cp}, 1.0, 1, StepSeconds(7.0, 1.0, {})) for cp in range(1, 5)]
    assert promising(8, none, (none, 4.0, 1, step), *fits)
    assert not promising(8, none, (none, 4.0, 1, step), *fits, fits[0])
    assert promising(8, none, (none, 4.0, 1, StepSeconds(6.9, 1.0, {})), *fits, fits[0])


@pytest.mark.parametrize(("fewest", "expected"), [(1, 1), (3, 4), (9, 8)])
def test_the_fewest_ranks_that_fit_share_a_sample(fewest, expected, monkeypatch, capsys):
    monkeypatch.setattr(choose, "_fits", lambda *terms: terms[-1] >= fewest)
    monkeypatch.setattr(choose, "processes", lambda: ThreadPoolExecutor(1))
    key = f"parallelism.context_parallel_degree={expected}"
    assert choose.fewest_ranks([*LLAMA], 8, 80.0) == [f"--{key}"]
    assert key in capsys.readouterr().err
    assert seeks_fewest_ranks([*LLAMA])
    assert not any(seeks_fewest_ranks([*LLAMA, f"--{CP}={given}"]) for given in (2, -1))


def test_ranks_are_left_as_they_are_where_nothing_can_be_predicted(monkeypatch, capsys):
    from torchtitan_dp.plan import __main__ as plan

    monkeypatch.setattr(plan, "memory_here_gib", lambda ranks: 1 / 0)
    assert plan.ranks_a_sample([*LLAMA], 8, 80.0, 8) == []
    assert "'auto': no memory could be predicted (ZeroDivisionError" in capsys.readouterr().err


def test_a_rank_fits_with_what_its_communicators_take():
    """0.26 GiB of tensors and four communicators, or 0.14 and five."""
    overrides = [*LLAMA, "--training.seq_len=8192"]
    found = [
        forks.call(choose._fits, overrides, 2, gib, cp)
        for gib, cp in ((2.3, 1), (2.5, 1), (2.7, 2), (2.9, 2))
    ]
    assert found == [False, True, False, True]


def test_chosen_keys_are_written_in_a_configuration(tmp_path):
    toml = "[training]\nseq_len = 8 # tokens\n\n[parallelism]\ncontext_parallel_degree = -1\n"
    keys = {
        "parallelism.context_parallel_degree": 2,
        "parallelism.keep_weights_gathered": True,
        "activation_checkpoint.mode": "full",
    }
    path, source = tmp_path / "chosen.toml", tmp_path / "source.toml"
    source.write_text(toml)
    choose.write(str(path), str(source), keys)
    assert "seq_len = 8 # tokens" in path.read_text()
    assert tomllib.loads(path.read_text()) == {
        "training": {"seq_len": 8},
        "parallelism": {"context_parallel_degree": 2, "keep_weights_gathered": True},
        "activation_checkpoint": {"mode": "full"},
    }
    with pytest.raises(ValueError, match=r"--write = .*is there already"):
        choose.write(str(path), str(source), keys)


@pytest.mark.slow
def test_the_plan_chooses_among_what_fits(tmp_path, capsys):
    chosen = tmp_path / "chosen.toml"
    command = [f"--job.config_file={DEBUG}", f"--job.dump_folder={tmp_path / 'out'}"]
    main([*command, "--gpus=2", "--machine=h100", "--choose", f"--write={chosen}"])
    said = capsys.readouterr().err
    assert "the fastest that fit" in said
    written = tomllib.loads(chosen.read_text())
    config = load_config([f"--job.config_file={chosen}"], 2)
    assert (
        config.parallelism.context_parallel_degree
        == (written["parallelism"]["context_parallel_degree"])
    )
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--gpus=2", "--machine=h100", "--choose", "--memory_gib=0.001"])
    assert "no setting fits in 0.001 GiB" in capsys.readouterr().err
