"""The benchmark's own arithmetic, and one tiny run. No test looks at how long anything took."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts.benchmarking import counts
from scripts.benchmarking.arms import ARMS, Setting, choose
from scripts.benchmarking.counting import bytes_of, flops_of
from scripts.benchmarking.measure import Measured
from scripts.benchmarking.opacus_arms import OpacusTrainer
from scripts.benchmarking.results import COLUMNS, GIB, arm_rows, table
from tests.processes import forks
from tests.processes.runs import said
from torchtitan_dp.config.load import load_config

ROOT = Path(__file__).parent.parent


def test_chosen_arms_bring_their_baselines():
    def names(*chosen):
        return [arm.name for arm in choose(*chosen)]

    assert names("V3,microbatch", 2) == ["non-DP", "microbatch", "non-DP + AC", "V2 + AC"]
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
    for name in ("Opacus hooks", "Opacus ghost"):
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


def made_up() -> Measured:
    """Rounds in which the machine halves its speed; V2 has no memory, V1 is not run."""
    names = ["non-DP", "microbatch", "V1", "V2", "non-DP + AC", "V2 + AC"]
    setting = Setting("", (), 2, 1, 1024, 2, 4)
    measured = [("non-DP", 2, 1.0), ("microbatch", 3, 1.25)]
    measured += [("non-DP + AC", 1.5, 2.0), ("V2 + AC", 1.5, 4.0)]
    weight = {"peak_allocated_bytes": 2 * GIB, "peak_reserved_bytes": None}
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
            "peak_allocated_gib": 2,
        },
        "V2 + AC": {  # against the baseline with checkpointing, and the one without
            **{"throughput_vs_non_dp": 0.5, "throughput_vs_non_dp_without_ac": 0.25},
            "memory_vs_non_dp": 1,
        },
        "V2": {"status": "OOM", "tokens_per_second": None},
    }
    assert {name: {key: rows[name][key] for key in expected[name]} for name in expected} == expected
    assert rows["V2"].keys() <= rows["microbatch"].keys()


def test_tables():
    text = table("arms", arm_rows(made_up()))
    assert text.startswith("| arm | processes | MBS | T | tokens/s per device | gap |")
    assert "| microbatch | 2 | 2 | 1,024 | 1,638 | 1.25 | 3.000 | 1.50 | 2.000 |" in text
    assert "| V2 | 2 | 2 | 1,024 | OOM | OOM | OOM | OOM | OOM |" in text
    assert "| V3 (V2 + AC) | 2 | 2 | 1,024 | 512 | 2.00 | 1.500 | 1.00 | 2.000 |" in text
    for path in (ROOT / "docs/benchmarks").glob("*.json"):  # what is stored can be shown
        stored = json.loads(path.read_text())
        kinds = [kind for kind in COLUMNS if stored.get(kind)]
        assert kinds or "paper_tables" in stored, path
        for kind in kinds:
            rows = table(kind, stored[kind]).splitlines()[2:][: len(stored[kind])]
            assert all(cell.strip() for row in rows for cell in row.split("|")[1:4]), path


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
        assert all(row[key] > 0 for key in (*of_each, "memory_vs_non_dp"))
    assert result["arms"][0]["throughput_vs_non_dp"] == 1
    assert "| arm | processes | MBS | T | tokens/s per device | gap |" in done.stdout
    assert run("--show", output).stdout == done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]
    assert "round 1 of 1" in done.stderr


@pytest.mark.thorough
def test_counts_of_both_methods_against_plain(monkeypatch):
    """No FLOP more than plain, and bytes within what docs/benchmarks/counts.json has of 1B."""
    monkeypatch.setattr(counts, "count", partial(forks.call, counts.count_here))
    one, several = counts.count_rows(["debug"], [512], [1, 2], 2)
    assert (one["method"], several["method"]) == ("microbatch", "grad_sample")
    for row in (one, several):
        assert row["flops_vs_non_dp"] == pytest.approx(1.0, abs=1e-3)
        assert set(row) >= {"model", "seq_len", "local_batch_size", "world_size"}
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
