"""The benchmark's own arithmetic, and one tiny run. No test looks at how long anything took."""

import contextlib
import dataclasses
import gc
import io
import json
import runpy
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn as nn

import scripts.benchmarking.measure as measuring
from scripts.benchmarking import counts, wanted, worker
from scripts.benchmarking.arms import ARMS, Setting, choose
from scripts.benchmarking.counting import BytesSent
from scripts.benchmarking.measure import Measured, Repetitions, heaviest
from scripts.benchmarking.opacus_arms import OpacusTrainer
from scripts.benchmarking.processes import Journal
from scripts.benchmarking.results import GIB, arm_rows, length_rows, rank_rows
from scripts.benchmarking.tables import COLUMNS, crossings, table
from scripts.benchmarking.worker import live_tensor_bytes
from tests.processes import forks
from tests.processes.ranks import on_ranks
from tests.processes.runs import said
from torchtitan_dp.config.load import load_config
from torchtitan_dp.plan.work import bytes_of, flops_of

ROOT = Path(__file__).parent.parent


def sent_by_plain_collectives() -> list[dict[str, int]]:
    """Each collective by itself, in the order of the expectations below."""
    group = dist.group.WORLD
    whole, half = torch.ones(20), torch.ones(10)
    me = dist.get_rank()
    calls = [
        lambda: dist.all_gather_into_tensor(whole, half),
        lambda: dist.all_gather([half.clone(), half.clone()], half),
        lambda: dist.reduce_scatter_tensor(half, whole),
        lambda: dist.all_reduce(whole),
        lambda: dist.all_to_all_single(torch.empty(20), whole),
        lambda: dist.broadcast(whole, src=0),
        lambda: dist.barrier(),
        lambda: functional.all_gather_tensor(half, 0, group).sum(),
        lambda: functional.all_reduce(whole, "sum", group).sum(),
        # a ring's rotation: all of it to the next rank
        lambda: functional.all_to_all_single(
            whole, [0, 20] if me == 0 else [20, 0], [0, 20] if me == 0 else [20, 0], group
        ).sum(),
    ]
    sent_by_step = []
    for call in calls:
        with BytesSent() as sent:
            call()
        sent_by_step.append(dict(sent.by_kind))
    return sent_by_step


@pytest.mark.thorough
def test_bytes_sent_by_each_collective():
    for rank, sent in enumerate(on_ranks(2, sent_by_plain_collectives)):
        assert sent == [
            # of an output of 80 bytes, half of it the other rank's
            *({"all_gather": 40}, {"all_gather": 40}, {"reduce_scatter": 40}),
            *({"all_reduce": 80}, {"all_to_all": 40}, {"broadcast": 80 if rank == 0 else 0}),
            *({}, {"all_gather": 40}, {"all_reduce": 80}, {"all_to_all": 80}),
        ]


def sent_by_fsdp() -> dict[str, int]:
    """Forward and backward of two layers under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    for module in (*model, model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    with BytesSent() as sent:
        model(torch.ones(3, 8)).sum().backward()
    return dict(sent.by_kind)


def test_bytes_sent_in_backward_are_seen():
    gathered = reduced = 48 * 4 // 2
    for sent in on_ranks(2, sent_by_fsdp):
        # each layer: gathered in forward and again in backward, reduced in backward
        assert sent == {"all_gather": 2 * 2 * gathered, "reduce_scatter": 2 * reduced}


def test_live_tensors_count_each_storage_once():
    while gc.collect():  # what other tests left, and what that held
        pass
    before = live_tensor_bytes()
    whole = torch.zeros(1000)
    views = [whole[:500], whole.view(10, 100)]
    assert live_tensor_bytes() - before == 4000
    del whole
    assert live_tensor_bytes() - before == 4000  # held by the views
    del views
    assert live_tensor_bytes() == before


def test_chosen_arms_bring_their_baselines():
    def names(*chosen):
        return [arm.name for arm in choose(*chosen)]

    plain = ["non-DP", "microbatch", "non-DP + AC", "V2 + AC"]
    assert names("V3,microbatch", 2) == plain
    adapted = ["non-DP + LoRA", "microbatch + LoRA", "V2 + LoRA"]
    assert names("V2 + LoRA,microbatch + LoRA", 2) == adapted
    assert not set(adapted) & set(names(None, 2))
    assert "Opacus hooks" in names(None, 1)
    assert "Opacus hooks" not in names(None, 2)
    with pytest.raises(ValueError, match="--arms V4: unknown"):
        choose("V4", 2)


def test_opacus_arms_take_the_same_step(tmp_path):
    """Without noise, ways to clip and per-sample gradients differ by rounding only."""
    setting = Setting(str(ROOT / "train_configs/llama3_debug.toml"), (), 1, 1, 16, 2, 2)
    stepped = []
    for name in ("Opacus hooks", "Opacus fast", "Opacus ghost"):
        arguments = setting.arguments(ARMS[name], str(tmp_path))
        config = load_config([*arguments, "--privacy.noise_multiplier=0"], 1)
        trainer = OpacusTrainer(config, ARMS[name].opacus)
        gradients = []
        trainer._optimizer.attach_step_hook(
            lambda optimizer, into=gradients: into.extend(p.grad.clone() for p in optimizer.params)
        )
        trainer.train_step()
        stepped.append(torch.cat([gradient.flatten() for gradient in gradients]))
    hooks, *fast_and_ghost = stepped
    assert hooks.norm() > 0
    assert all((hooks - other).norm() < 1e-4 * hooks.norm() for other in fast_and_ghost)


def tiny() -> Setting:
    return Setting("", (), 1, 1, 32, 1, 1)


def made_up() -> Measured:
    """Rounds in which the machine halves its speed; V2 has no memory, V1 is not run."""
    names = ["non-DP", "microbatch", "V1", "V2", "non-DP + AC", "V2 + AC"]
    setting = Setting("", (), 2, 1, 1024, 2, 4)
    measured = [("non-DP", 2, 1.0), ("microbatch", 3, 1.25)]
    measured += [("non-DP + AC", 1.5, 2.0), ("V2 + AC", 1.5, 4.0)]
    weight = {
        "peak_allocated_bytes": 2 * GIB,
        "peak_reserved_bytes": None,
        "bytes_beside_the_pool": None,
        "bytes_sent": {"all_gather": 2**20, "all_reduce": 2**21},
        "per_sample_gradient_bytes": 3 * 2**20,
    }
    return Measured(
        setting,
        [ARMS[name] for name in names],
        weighed={name: {**weight, "peak_bytes": gib * GIB} for name, gib, _ in measured},
        seconds={name: [first, 2 * first, 2 * first] for name, _, first in measured},
        no_memory={"V2"},
        skipped={"V1": "why not"},
        in_turns=True,
    )


def test_rows_hold_medians_and_ratios_within_rounds():
    rows = {row["name"]: row for row in arm_rows(made_up())}
    assert "V1" not in rows
    expected = {
        "microbatch": {
            "tokens_per_second": 4 * 2 * 1024 / 2.5,
            "tokens_per_second_per_device": 4 * 2 * 1024 / 2.5 / 2,
            **{"throughput_vs_non_dp": 0.8, "gap_to_non_dp": 1.25, "memory_vs_non_dp": 1.5},
            **{"peak_allocated_gib": 2, "bytes_sent_per_step": 3 * 2**20},
        },
        "V2 + AC": {  # against the baseline with checkpointing, and the one without
            **{"throughput_vs_non_dp": 0.5, "throughput_vs_non_dp_without_ac": 0.25},
            "memory_vs_non_dp": 1,
        },
        "V2": {"status": "OOM", "tokens_per_second": None},
    }
    assert {name: {key: rows[name][key] for key in expected[name]} for name in expected} == expected
    assert rows["V2"].keys() <= rows["microbatch"].keys()
    of_lengths = {row["name"]: row for row in length_rows(made_up())}["microbatch"]
    assert of_lengths["extra_seconds_per_step"] == 0.5
    per_token = of_lengths["extra_microseconds_per_token"]
    assert per_token == pytest.approx(1e6 * 0.5 / (4 * 2 * 1024))


def test_an_arm_outlives_its_baseline():
    found = made_up()
    del found.seconds["non-DP"], found.weighed["non-DP"]
    found.no_memory.add("non-DP")
    (row,) = (row for row in arm_rows(found) if row["name"] == "microbatch")
    assert row["tokens_per_second"] is not None
    assert row["gap_to_non_dp"] is row["memory_vs_non_dp"] is None


def test_tables():
    text = table("arms", arm_rows(made_up()))
    assert text.startswith("| arm | processes | MBS | T | tokens/s per device | gap |")
    assert "| microbatch | 2 | 2 | 1,024 | 1,638 | 1.25 | 3.000 | 1.50 | 2.000 |" in text
    assert "| V2 | 2 | 2 | 1,024 | OOM | OOM | OOM | OOM | OOM |" in text
    assert "| V3 (V2 + AC) | 2 | 2 | 1,024 | 512 | 2.00 | 1.500 | 1.00 | 2.000 |" in text
    lengths = table("lengths", length_rows(made_up()))
    assert "| microbatch | 2 | 2 | 1,024 | 2.000 | 2.500 | 0.500 | 61.04 |" in lengths
    ranks = table("ranks", rank_rows(made_up()))
    sent = "3,145,728 | all_gather: 1.049e+06, all_reduce: 2.097e+06"
    assert f"| microbatch | 2 | 2 | 3,145,728 | {sent} |" in ranks
    assert "| V2 | 2 | 2 | OOM | OOM | OOM |" in ranks
    for path in (ROOT / "docs/benchmarks").glob("*.json"):  # what is stored can be shown
        stored = json.loads(path.read_text())
        kinds = [kind for kind in COLUMNS if stored.get(kind)]
        assert kinds or {"paper_tables", "settings"} & stored.keys(), path
        for kind in kinds:
            rows = table(kind, stored[kind]).splitlines()[2:][: len(stored[kind])]
            assert all(cell.strip() for row in rows for cell in row.split("|")[1:4]), path


def test_a_rank_reports_the_heaviest():
    light = {"peak_bytes": 1.0, "bytes_sent": {"broadcast": 5, "all_reduce": 1}}
    heavy = {"peak_bytes": 2.0, "bytes_sent": {"all_reduce": 1}}
    sent = {"all_reduce": 1, "broadcast": 5}
    assert heaviest([light, heavy]) == {"peak_bytes": 2.0, "bytes_sent": sent}


@torch.compile(fullgraph=True, backend="eager")
def compiled_add(x):
    return x + 1


def weighed_with_a_compiled_step():
    """The bytes of a step that compiles a whole function, as noise on CUDA is compiled."""

    def step():
        compiled_add(torch.ones(2))
        dist.all_reduce(torch.ones(4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "build", lambda *_: step)
        patch.setattr(worker, "map_tensors_alone", lambda: None)
        return worker.weigh(ARMS["microbatch"], tiny(), "")["bytes_sent"]


def test_bytes_of_a_compiled_step_are_counted():
    assert on_ranks(2, weighed_with_a_compiled_step) == [{"all_reduce": 16}] * 2


@pytest.fixture
def measured_by(monkeypatch):
    """`measure` with made-up processes; what they were asked for, and when they are cut off."""
    asked: list[str] = []

    def on_processes(devices, function, first, setting, *args, **how_often):
        if len(asked) == measured_by.cut_off_after:
            raise KeyboardInterrupt
        if function is worker.weigh:
            asked.append(first.name)
            return [{**dict.fromkeys(WEIGHED, 1.0), "bytes_sent": {}}]
        journal, key = args
        for _ in range(len(journal.of(key)), how_often["rounds"]):
            if len(asked) == measured_by.cut_off_after:
                raise KeyboardInterrupt
            asked.append("round")
            journal.add(key, {arm.name: 2.0 for arm in first})
        return [None]

    monkeypatch.setattr(measuring, "on_processes", on_processes)
    monkeypatch.setattr(measuring, "_is_built", lambda *_: True)
    measured_by = types.SimpleNamespace(asked=asked, cut_off_after=None)
    return measured_by


WEIGHED = (
    *("peak_bytes", "peak_reserved_bytes", "bytes_beside_the_pool", "peak_allocated_bytes"),
    "per_sample_gradient_bytes",
)
ALL_MEASURED = ["non-DP", "microbatch", "round", "round", "round"]


@pytest.mark.parametrize("cut_off_after", range(len(ALL_MEASURED) + 1))
def test_a_benchmark_goes_on_where_it_was_cut_off(tmp_path, measured_by, cut_off_after):
    arms, path = choose("microbatch", 1), tmp_path / "b.json.partial"
    repetitions = Repetitions(rounds=3, steps=1, warm_up=1)

    def last():
        *_, found = measuring.measure(arms, tiny(), repetitions, Journal(path))
        return found

    measured_by.cut_off_after = cut_off_after
    if cut_off_after < len(ALL_MEASURED):
        with pytest.raises(KeyboardInterrupt):
            last()
    if path.exists():
        with path.open("a") as file:
            file.write('["cut')  # the line that it was writing
    measured_by.cut_off_after = None
    found = last()
    assert measured_by.asked == ALL_MEASURED
    assert set(found.weighed) == {"non-DP", "microbatch"}
    assert found.seconds == {"non-DP": [2.0] * 3, "microbatch": [2.0] * 3}
    assert last().seconds == found.seconds
    assert measured_by.asked == ALL_MEASURED


def test_results_are_there_as_arms_come(tmp_path, measured_by):
    often = Repetitions(rounds=1, steps=1, warm_up=1)
    steps = measuring.measure(choose("microbatch", 1), tiny(), often, Journal())
    found = [[row["status"] for row in arm_rows(step)] for step in steps]
    assert found == [["ok", "pending"], ["ok", "ok"], ["ok", "ok"]]


def test_other_settings_are_measured_anew(tmp_path, measured_by):
    repetitions = Repetitions(rounds=1, steps=1, warm_up=1)
    path = tmp_path / "journal"
    list(measuring.measure(choose("non-DP", 1), tiny(), repetitions, Journal(path)))
    other = dataclasses.replace(tiny(), seq_len=999)
    list(measuring.measure(choose("non-DP", 1), other, repetitions, Journal(path)))
    assert measured_by.asked == ["non-DP", "round"] * 2
    Journal(path).remove()
    assert not path.exists()


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    forks.need()
    return said(sys.executable, "scripts/benchmark.py", *arguments, GLOO_SOCKET_IFNAME="lo")


@pytest.mark.thorough
def test_one_tiny_run(tmp_path):
    output = tmp_path / "b.json"
    done = run(
        *("--devices", "2", "--arms", "microbatch", "--batch_sizes", "2", "--microbatches", "1"),
        *("--rounds", "1", "--steps", "1", "--json", output),
        *("--training.seq_len=32", "--privacy.accountant=rdp"),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads(output.read_text())
    assert result["machine"]
    assert [row["name"] for row in result["arms"]] == ["non-DP", "microbatch"]
    of_each = ("tokens_per_second", "throughput_vs_non_dp", "peak_memory_gib")
    for row in result["arms"]:
        assert (row["seq_len"], row["local_batch_size"], row["world_size"]) == (32, 2, 2)
        assert all(row[key] > 0 for key in (*of_each, "memory_vs_non_dp", "bytes_sent_per_step"))
    assert result["arms"][0]["throughput_vs_non_dp"] == 1
    assert result["arms"][1]["per_sample_gradient_bytes"] > 0
    assert "| arm | processes | MBS | T | tokens/s per device | gap |" in done.stdout
    assert run("--show", output).stdout == done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]
    assert "round 1 of 1" in done.stderr


def in_a_fork(arguments: list[str]) -> tuple[object, str]:
    """The script's exit code and what it says on stderr, in this process."""
    sys.argv = ["scripts/benchmark.py", *arguments]
    sys.path.insert(0, str(ROOT / "scripts"))
    with contextlib.redirect_stderr(io.StringIO()) as told, pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    return stop.value.code, told.getvalue()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arms", "V4"], "--arms V4: unknown"),
        (["--training.local_batch_size=2"], "use --batch_sizes"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    code, told = forks.call(in_a_fork, arguments)
    assert code == 2
    (line,) = told.splitlines()
    assert message in line


@pytest.mark.thorough
def test_counts_of_both_methods_against_plain(monkeypatch):
    """No FLOP more than plain, and bytes within what docs/benchmarks/counts.json has of 1B."""
    monkeypatch.setattr(counts, "count", partial(forks.call, counts.count_here))
    one, several = counts.count_rows(["debug"], [512], [1, 2], 2)
    assert (one["method"], several["method"]) == ("microbatch", "grad_sample")
    for row in (one, several):
        assert row["flops_vs_non_dp"] == pytest.approx(1.0, abs=1e-3)
        assert set(row) >= {"model", "seq_len", "local_batch_size", "world_size"}
        assert row["bytes_by_part"]["clip and add"] > 0
    assert one["bytes_vs_non_dp"] < 1.05
    assert several["bytes_vs_non_dp"] < 1.25


def test_what_an_operation_moves():
    aten, x, y = torch.ops.aten, torch.ones(4, 5), torch.ones(5)
    views = (aten.view.default, aten._unsafe_view.default, aten.empty.memory_format)
    assert all(bytes_of(view, (x, [20]), {}, x) == 0 for view in views)
    assert bytes_of(aten.add.Tensor, (x, y.expand(4, 5)), {}, x + y) == 4 * (20 + 5 + 20)
    assert bytes_of(aten.add_.Tensor, (x, x), {}, x) == 4 * 60
    assert bytes_of(aten.copy_.default, (x, x), {}, x) == 4 * 40
    assert bytes_of(aten.mm.out, (x, x.T), {"out": y}, y) == 4 * 45
    product = torch.ops.torchtitan_dp.write_product_.default
    out = torch.zeros(4, 4)
    assert bytes_of(product, (out, x, x.T), {}, None) == 4 * (16 + 40)
    assert flops_of(product, (out, x, x.T), {}, None) == 2 * 4 * 5 * 4
    added = torch.ops.torchtitan_dp.add_product_.default
    assert bytes_of(added, (out, x, x.T), {}, None) == 4 * (32 + 40)


def crossing_rows(scatter=0.02):
    """Ghost is faster than V2 and smaller up to T = 128."""
    curves = {
        "non-DP": [(100, 1), (100, 1), (100, 1)],
        "V2": [(50, 3), (70, 3), (90, 3)],
        "ghost": [(80, 1), (75, 2), (60, 4)],
    }
    return [
        {
            "name": name,
            "seq_len": 64 * 2**place,
            "throughput_vs_non_dp_rounds": [(1 - scatter) * speed, (1 + scatter) * speed],
            "peak_allocated_gib": float(memory),
        }
        for name, points in curves.items()
        for place, (speed, memory) in enumerate(points)
    ]


def test_where_arms_change_places():
    assert crossings(crossing_rows()) == [
        "tokens/s: from T = 128 to 256 V2 passes ghost",
        "memory allocated: from T = 128 to 256 ghost passes V2",
    ]
    assert crossings(crossing_rows(scatter=0.9)) == crossings(crossing_rows())[1:]


def test_all_lengths_of_the_crossover_have_as_many_tokens_a_step():
    asked = types.SimpleNamespace(
        config=str(ROOT / "train_configs/llama3_debug.toml"),
        **{"arms": None, "batch_sizes": None, "microbatches": None},
        **{"rounds": 3, "steps": 1, "warm_up": 1},
    )
    compared = wanted.compare_crossover(asked, ["--training.seq_len=1024"], 1)
    settings = [setting for _, setting, _ in compared]
    assert [one.seq_len for one in settings] == [64, 128, 256, 512, 1024]
    assert {(one.tokens, one.local_batch_size) for one in settings} == {(4096, 4)}
