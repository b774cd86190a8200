"""The paper's tables: its figures, the shapes that are run, what is stored and how it is marked."""

import json
import re
import types
from pathlib import Path

import pytest

import scripts.benchmarking.paper_predictions as predicting
import scripts.benchmarking.paper_tables as making
from scripts.benchmarking import crossover, paper_figures, wanted
from scripts.benchmarking.arms import ARMS
from scripts.benchmarking.journal import Journal
from scripts.benchmarking.measure import Measured
from scripts.benchmarking.paper_pages import MEASURED, PAPER, PREDICTED, Column, page, table_of
from scripts.benchmarking.paper_predictions import CP, FSDP, Task
from scripts.benchmarking.paper_tables import (
    MANY,
    paper_shapes,
    predicted_tasks,
    scaled_shapes,
)

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "docs/benchmarks/paper_tables.json"


@pytest.mark.parametrize("table", [3, 4, 5])
def test_the_papers_figures_agree_with_each_other(table):
    """A figure that was copied wrongly does not fit the gaps that the paper prints beside it."""
    rows = paper_figures.rows(table)
    assert len(rows) == {3: 12, 4: 9, 5: 9}[table]
    checked = 0
    for row in rows:
        for gaps, figures, inverse in (
            (row.speed_gap, row.throughput, False),
            (row.memory_gap, row.memory, True),
        ):
            for arm, gap in gaps.items():
                if isinstance(gap, float):
                    ratio = figures["non-DP"] / figures[arm]
                    assert gap == pytest.approx(1 / ratio if inverse else ratio, abs=0.011), row
                    checked += 1
                else:
                    assert (gap, figures[arm]) == (None, paper_figures.OOM)
    assert checked == {3: 12, 4: 30, 5: 0}[table]


def test_the_papers_tables_agree_with_each_other():
    longest = paper_figures.longest()
    assert len(longest) == 3 * 3 * 4
    for row in paper_figures.rows(3):
        assert longest[row.model, "4", row.local_batch_size] == row.seq_len
    with_cp = {(r.model, r.seq_len): r for r in paper_figures.rows(4) if r.local_batch_size == 1}
    for row in paper_figures.rows(5):
        if (row.model, row.seq_len) in with_cp:
            for arm in ("non-DP", "V2"):
                assert row.throughput[arm] == with_cp[row.model, row.seq_len].throughput[arm]
                assert row.memory[arm] == with_cp[row.model, row.seq_len].memory[arm]


def test_scaled_shapes_hold_the_tokens_of_a_microbatch():
    shapes = {
        table: scaled_shapes(table, "debug", 2, 1024, [1, 2, 4], None) for table in making.TABLES
    }
    assert {len(shapes[table]) for table in "34"} == {3}
    assert {one.local_batch_size * one.seq_len for one in shapes["3"]} == {1024}
    assert {one.local_batch_size * one.seq_len for one in shapes["4"]} == {2048}
    assert [one.seq_len for one in shapes["5"]] == [2048, 4096]
    assert {one.world_size for one in shapes["2"]} == {1, 2}
    for table, found in shapes.items():
        assert {one.mesh for one in found} == {FSDP if table in "23" else CP}
        for one in found:
            ours = any(arm.startswith("microbatch") for arm in one.arms)
            assert ours == (table != "3" and one.local_batch_size == 1)
    with pytest.raises(ValueError, match="--batch_sizes 600: too many for 1024 tokens"):
        scaled_shapes("3", "debug", 2, 1024, [600], None)


def test_an_arm_is_added_by_its_name():
    (shape, *_) = paper_shapes("4", ["8B"], "ghost two passes", (4,))
    assert shape.arms == ("non-DP", "ghost two passes")


def test_the_papers_lines_are_predicted():
    longest = predicted_tasks("2", ["1B", "8B"], None)
    assert len(longest) == 2 * 3 * (3 * 4 + 1)
    assert {task.world_size for task in longest} == {1, 4, MANY}
    assert {task.seq_len for task in longest} == {None}
    rows = predicted_tasks("4", ["8B"], None)
    assert [task.seq_len for task in rows] == [16384] * 4 + [8192] * 3 + [4096] * 3
    assert {task.mesh for task in rows} == {CP}


@pytest.mark.parametrize("first", [16, 1024, 4096, 8192, 2**20])
def test_the_longest_that_fits(first):
    tried = []

    def fits(seq_len):
        tried.append(seq_len)
        return seq_len <= 5000

    assert predicting.longest(fits, first, shortest=16) == 4096
    assert len(tried) == len(set(tried))
    assert predicting.longest(lambda seq_len: False, first) is None
    assert predicting.longest(lambda seq_len: True, first, most=2**20) == 2**20
    assert predicting.longest(lambda seq_len: seq_len <= 16, first, shortest=16) == 16


def test_on_a_cpu_the_budget_decides():
    found = Measured(None, [ARMS["V2"]], weighed={"V2": {"peak_allocated_bytes": 10}})
    assert making.within(found, "V2", 10)
    assert making.within(found, "V2", None)
    assert not making.within(found, "V2", 9)
    assert not making.within(found, "V1", None)  # it ran out of memory
    found.skipped["ghost"] = "why not"
    with pytest.raises(ValueError, match="--arms ghost: why not"):
        making.within(found, "ghost", None)


def test_predictions_are_not_made_twice(tmp_path, monkeypatch):
    tasks = predicted_tasks("3", ["1B"], None)
    asked = []

    def in_a_process(missing):
        for task in missing:
            asked.append(task)
            yield {"place": tasks.index(task)}

    monkeypatch.setattr(predicting, "_in_a_process", in_a_process)
    path = tmp_path / "journal"
    first = predicting.predict(tasks, Journal(path), lambda _: None)
    assert [next(first)[1]["place"] for _ in range(3)] == [0, 1, 2]
    assert len(asked) == 3
    found = list(predicting.predict(tasks, Journal(path), lambda _: None))
    assert asked == tasks
    assert found == [(task, {"place": place}) for place, task in enumerate(tasks)]


@pytest.mark.thorough
def test_what_cannot_be_predicted_says_why():
    with pytest.raises(RuntimeError, match="could not be predicted"):
        list(predicting.predict([Task("9B", "V2", 1, CP, 1, 64)], Journal(), lambda _: None))


def options(path, table, **more):
    return types.SimpleNamespace(
        json=path,
        table=table,
        parts="measured,predicted",
        models="8B",
        arms=None,
        **more,
    )


def measured_row(**more):
    return {
        "name": "V2",
        "status": "ok",
        "local_batch_size": 1,
        "world_size": 4,
        "mesh": CP,
        "seq_len": 16384,
        "tokens_per_second_per_device": 4080.0,
        "gap_to_non_dp": 1.09,
        "peak_reserved_gib": 72.2,
        "peak_allocated_gib": 0.5,
        **more,
    }


def test_what_is_found_goes_to_what_is_there(tmp_path, monkeypatch):
    path = tmp_path / "tables.json"
    kept = {"3": {"cpu": {"debug": {"rows": [1]}}}, "4": {"cuda": {"1B": {"rows": [2]}}}}
    before = {"predicted": {"8B": {"rows": [3]}, "1B": {"rows": [4]}}}
    stored = {"3": kept["3"], "4": {**kept["4"], **before}}
    path.write_text(json.dumps({"paper_tables": stored}))
    monkeypatch.setattr(making, "_measured", lambda *_: iter([("debug", {"rows": [5]})]))
    monkeypatch.setattr(
        making, "predict", lambda tasks, *_: ((task, {"peak_memory_gib": 1.0}) for task in tasks)
    )
    *_, found = making.run(options(path, "4"), [], Journal())
    assert found["3"] == kept["3"]
    assert found["4"]["cuda"] == kept["4"]["cuda"]
    assert found["4"]["cpu"]["debug"]["rows"] == [5]
    assert found["4"]["predicted"]["1B"] == {"rows": [4]}
    rows = found["4"]["predicted"]["8B"]["rows"]
    assert [row["seq_len"] for row in rows] == [16384] * 4 + [8192] * 3 + [4096] * 3
    with pytest.raises(ValueError, match="--models 9B: choose from 1B, 3B, 8B"):
        next(
            making.run(types.SimpleNamespace(**{**vars(options(path, "4")), "models": "9B"}), [], 1)
        )


WRITTEN = {
    PAPER: r"[^*≈]*",
    MEASURED: r"(\*\*[^*≈]+\*\*)?",
    PREDICTED: r"(\*≈ [^*≈]+\*)?",
}


def columns_of(text):
    """All columns of a page's tables: their heads, and the cells below them."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n?)+", text, re.M):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        head, _, *cells = lines
        assert all(len(line) == len(head) for line in lines)
        found += [(name, list(column)) for name, *column in zip(head, *cells, strict=True)]
    return found


def check_marks(text):
    """Each column is of one kind; returns the cells that are filled, by kind."""
    filled = {kind: 0 for kind in WRITTEN}
    for head, cells in columns_of(text):
        kind, colon, _ = head.partition(":")
        if not colon:
            assert head in ("model", "MBS", "T", "processes"), head
            continue
        for cell in cells:
            assert re.fullmatch(WRITTEN[kind], cell), (head, cell)
        filled[kind] += sum(map(bool, cells))
    return filled


def made_up():
    predicted = {"name": "V2", "local_batch_size": 1, "world_size": 4, "mesh": CP}
    row = {"seq_len": 16384, "peak_memory_gib": 72.2, "fits": True, "flops": 4.0, "bytes": 3.0}
    base = {**predicted, **row, "name": "non-DP", "flops": 2.0, "peak_memory_gib": 99.0}
    entry = {"machine": "Four GPUs", "command": "cmd", "grid": "paper", "rounds": 3}
    longest = {**predicted, "mesh": FSDP, "budget_mib": 128.0}
    small = {"seq_len": 2048, "world_size": 2}
    return {
        "2": {
            "predicted": {
                "8B": {
                    "command": "cmd",
                    "torch": "2",
                    "rows": [{**longest, "longest_seq_len": 4096}],
                }
            },
            "cpu": {
                "debug": {
                    **entry,
                    "grid": "scaled",
                    "rows": [{**longest, "longest_seq_len": None}],
                }
            },
        },
        "4": {
            "predicted": {
                "8B": {
                    "command": "cmd",
                    "torch": "2",
                    "rows": [{**base, "fits": False}, {**predicted, **row}],
                }
            },
            "cuda": {"8B": {**entry, "rows": [measured_row()]}},
            "cpu": {"debug": {**entry, "grid": "scaled", "rows": [measured_row(**small)]}},
        },
    }


def test_no_column_holds_two_kinds():
    text = page(made_up())
    filled = check_marks(text)
    # of the paper: 36 in Table 2; in Table 4 four of throughput, three of memory, and gaps
    assert filled[PAPER] == 36 + 9 * 4 + (18 - 3) + 9 * 3
    assert filled[MEASURED] == 3 + 1 + 3  # on four GPUs; on a CPU, of Table 2 and of Table 4
    assert filled[PREDICTED] == 1 + 2 + 2
    assert "| *≈ 2.00* |" in text
    assert "*≈ 99.0 OOM*" in text
    assert "**4,080**" in text
    assert "--table 4 --devices 4 --parts measured" in text


def test_the_page_that_is_stored_is_that_of_its_figures():
    stored = json.loads(STORED.read_text())["paper_tables"]
    text = page(stored)
    assert set(stored) == set(making.TABLES)
    filled = check_marks(text)
    assert all(filled.values())
    for head, cells in columns_of(text):
        if head.startswith(MEASURED) and "GPU" in head:  # nobody had any
            assert not any(cells), head


def test_kinds_are_told_apart_whatever_the_figure():
    columns = [Column(kind, "V2", lambda key: "4.08k") for kind in WRITTEN]
    (line,) = table_of(["T"], [(16384,)], columns).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells == ["4.08k", "**4.08k**", "*≈ 4.08k*"]


def crossing_rows():
    """Ghost is faster than V2 and smaller up to T = 128."""
    curves = {
        "non-DP": [(100, 1), (100, 1), (100, 1)],
        "V2": [(50, 3), (70, 3), (90, 3)],
        "ghost": [(80, 1), (75, 2), (60, 4)],
    }
    return [
        {
            "name": name,
            "status": "ok",
            "seq_len": 64 * 2**place,
            "local_batch_size": 4,
            "microbatches": 4 // 2**place,
            "world_size": 1,
            "tokens_per_second_per_device": float(speed),
            "gap_to_non_dp": 100 / speed,
            "throughput_vs_non_dp": speed / 100,
            "throughput_vs_non_dp_rounds": [speed / 102, speed / 98],
            "peak_memory_gib": 1.0,
            "memory_vs_non_dp": 1.0,
            "peak_allocated_gib": float(memory),
        }
        for name, points in curves.items()
        for place, (speed, memory) in enumerate(points)
    ]


def test_where_arms_change_places():
    assert crossover.crossings(crossing_rows()) == [
        "tokens/s: from T = 128 to 256 V2 passes ghost",
        "memory allocated: from T = 128 to 256 ghost passes V2",
    ]
    scattered = [{**row, "throughput_vs_non_dp_rounds": [0.1, 1.0]} for row in crossing_rows()]
    assert crossover.crossings(scattered) == crossover.crossings(crossing_rows())[1:]
    text = crossover.section(crossing_rows())
    assert "| 4 | 256 | 100 | 90 | 60 | 1.11 | 1.67 |" in text


def test_all_lengths_of_the_crossover_have_as_many_tokens_a_step():
    asked = types.SimpleNamespace(
        config=str(ROOT / "train_configs/llama3_debug.toml"),
        arms=None,
        batch_sizes=None,
        microbatches=None,
        rounds=3,
        steps=1,
        warm_up=1,
    )
    settings = [setting for _, setting, _ in wanted.compare_crossover(asked, [], 1)]
    assert [one.seq_len for one in settings] == [64, 128, 256, 512, 1024]
    assert {one.tokens for one in settings} == {4096}
    assert {one.local_batch_size for one in settings} == {4}
