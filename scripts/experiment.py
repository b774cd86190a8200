"""What a private model is worth: tunes a small Llama, made of public text, on private text.

    python scripts/experiment.py --out FOLDER [--only NAME…] [--steps N] [--pretrain]
    python scripts/experiment.py --report docs [--out FOLDER]
    python scripts/experiment.py --tried

Takes the runs of docs/results/runs.json again, each by the options that stand there, on one CPU
core, from the weights of examples/pretrained, or with `--pretrain` from others, made anew. A run
that is done is not run again: its numbers are in FOLDER/results/NAME.json. `--only` takes those
whose names begin so, `--steps` that many steps of everything, to try this script. `--report docs`
makes the tables of docs/results.md, and with `--out` first puts FOLDER's numbers into runs.json.
`--tried` prints all of runs.json, by setting.

Public text: Python's documentation and standard library. Private: the sources of one company's
installed packages; a file is a unit. A folder is held out as a whole. Leaks are looked for by
lines: a private file that is another's copy, or that shares lines with the standard library, is
left out; so is a held-out file half of whose lines a training file has, too.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PRETRAINED = ROOT / "examples" / "pretrained"
Run = dict[str, Any]  # a run's name, arm (its settings), options, losses and, if private, privacy

PACKAGES = ("transformers", "huggingface_hub", "datasets", "tokenizers", "safetensors")
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
NOT_TEXT |= {"encodings", "lib2to3", "ensurepip", "__pycache__"}
PIECE_CHARACTERS = 6000  # of public text: a sample's worth, about 2,048 tokens
SEQ_LEN, BUCKET = 2048, 256  # of the evaluation, tokens
SHAPE = json.loads("""{"architectures": ["LlamaForCausalLM"], "model_type": "llama",
"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
"num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048, "hidden_act": "silu",
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "float32",
"bos_token_id": 0, "eos_token_id": 1}""")
MARKS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
COMMON = """job.custom_config_module = "torchtitan_dp.config"; model.name = "llama3"
activation_checkpoint.mode = "none"; checkpoint.enable = true; checkpoint.last_save_in_hf = true
optimizer.name = "AdamW"; optimizer.lr = 4e-3; optimizer.weight_decay = 0.0
training.seq_len = 2048; training.mixed_precision_param = "float32"
"""
PUBLIC = f"""{COMMON}privacy.enable = false; training.dataset = "jsonl"; training.max_norm = 1.0
training.local_batch_size = 4; training.global_batch_size = 8; training.steps = 1000
lr_scheduler.warmup_steps = 50; lr_scheduler.decay_ratio = 0.7; lr_scheduler.min_lr_factor = 0.02
checkpoint.interval = 100; checkpoint.keep_latest_k = 2; metrics.log_freq = 10
"""
PRIVATE = f"""{COMMON}privacy.delta = 1e-5; privacy.max_grad_norm = 1.0
privacy.initial_weights_public = true; lora.export = "merged"; checkpoint.initial_load_in_hf = true
training.dataset = "text"; training.local_batch_size = 1; training.loss_chunk_tokens = 0
lr_scheduler.warmup_steps = 2; lr_scheduler.decay_ratio = 0.5; lr_scheduler.min_lr_factor = 0.1
"""
TITLES = {
    **{"none": "no tuning", "noise": "noise alone, as at ε = {:g}"},
    **{"private": "ε = {:g}", "plain": "without privacy"},
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for text, weights and numbers")
    parser.add_argument("--only", nargs="+", default=[""], help="what names begin with")
    parser.add_argument("--steps", type=int, help="of pre-training and of each run")
    parser.add_argument("--pretrain", action="store_true", help="make other starting weights")
    parser.add_argument("--report", type=Path, metavar="DOCS", help="make the page's tables there")
    parser.add_argument("--tried", action="store_true", help="print a table of all runs")
    options = parser.parse_args(argv)
    if options.tried:
        print(tables(ROOT / "docs")["tried"])
        return
    if options.report is not None:
        report(options.report, options.out)
        return
    wanted = [r for r in read(ROOT / "docs") if r["name"].startswith((*options.only,))]
    if options.out is None:
        parser.error("--out: name a folder")
    out = options.out.resolve()
    prepare(out, options.steps, pretrain=options.pretrain)
    for run in wanted:
        print(f"{run['name']}: held-out loss {do(out, run, options.steps)['loss']:.4f}", flush=True)


# The text.


def build_corpus(folder: Path) -> None:
    """Write `public.jsonl`, `private/`, `heldout/` and, last, what they hold, `corpus.json`."""
    if (folder / "corpus.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    library = [text for _, text in sources(Path(sysconfig.get_path("stdlib")), NOT_TEXT)]
    documents = list(documentation(library))
    pieces = [*cut(documents), *cut(library)]
    lines = (json.dumps({"text": piece}) + "\n" for piece in pieces)
    (folder / "public.jsonl").write_text("".join(lines), "utf-8")
    private, left_out = private_files(telling(library))
    train, heldout = split(private)
    kept = without_siblings(heldout, train)
    left_out["held out and like training"] = len(heldout) - len(kept)
    for name, texts in (("private", train), ("heldout", kept)):
        for path, text in texts.items():
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    content = {
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "public_pieces": len(pieces),
        "public_documentation_bytes": sum(map(len, documents)),
        "public_source_bytes": sum(map(len, library)),
        "private_files": len(train),
        "heldout_files": len(kept),
        "left_out": left_out,
    }
    (folder / "corpus.json").write_text(json.dumps(content, indent=1) + "\n")


def sources(root: Path, without: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the Python files below `root` in a fixed order: relative path, text."""
    for place, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - without)
        for path in (Path(place) / name for name in sorted(names) if name.endswith(".py")):
            try:
                yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
            except UnicodeError:
                continue


def documentation(library: list[str]) -> Iterator[str]:
    """Yield pydoc's topics, and each standard module's docstrings of 100 characters and more."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for text in library:
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        except (SyntaxError, ValueError):
            continue
        found = [ast.get_docstring(node) or "" for node in nodes]
        if kept := "\n\n".join(text for text in found if len(text) >= 100):
            yield kept


def cut(texts: Iterable[str]) -> list[str]:
    whole = "\n\n".join(texts)
    return [whole[at : at + PIECE_CHARACTERS] for at in range(0, len(whole), PIECE_CHARACTERS)]


def private_files(public: set[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the packages' files by path, and how many were left out for what reason."""
    kept: dict[str, str] = {}
    without, seen = {"short": 0, "copies": 0, "like the standard library": 0}, set()
    for package in PACKAGES:
        root = Path(sysconfig.get_path("purelib")) / package
        for path, text in sources(root, {"__pycache__"}):
            if len(text) < 300:  # mostly an empty __init__.py
                without["short"] += 1
            elif text in seen:
                without["copies"] += 1
            elif shared(text, public) > 0.2:
                without["like the standard library"] += 1
            else:
                seen.add(text)
                kept[f"{package}/{path}"] = text
    return kept, without


def split(files: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Part files into those to train on and to hold out (a fifth), by a hash of their folder."""

    def is_held(path: str) -> bool:
        digest = hashlib.blake2b(os.path.dirname(path).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < 0.2

    parts: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for path, text in files.items():
        parts[is_held(path)][path] = text
    return parts


def without_siblings(heldout: dict[str, str], train: dict[str, str]) -> dict[str, str]:
    """Leave out held-out files most of whose lines are in training files."""
    lines = telling(train.values())
    return {path: text for path, text in heldout.items() if shared(text, lines) <= 0.5}


def telling(texts: Iterable[str]) -> set[str]:
    """Collect the lines that say whose they are: long ones, and no comments."""
    stripped = (line.strip() for text in texts for line in text.splitlines())
    return {line for line in stripped if len(line) >= 25 and not line.startswith("#")}


def shared(text: str, others: set[str]) -> float:
    """Return the share of a text's telling lines that the others have, too."""
    lines = telling([text])
    return len(lines & others) / max(len(lines), 1)


# The runs.


def prepare(out: Path, steps: int | None, *, pretrain: bool) -> None:
    """Make the corpus and the settings, and copy the starting weights, or make others; what is
    there is kept."""
    build_corpus(out / "corpus")
    for name, settings in (("public", PUBLIC), ("private", PRIVATE)):
        (out / f"{name}.toml").write_text(settings.replace("; ", "\n"))
    if (out / "base" / "model.safetensors").exists():
        return
    if not pretrain:
        shutil.copytree(PRETRAINED, out / "base")
        return
    write_model_files(out / "shape", out / "corpus" / "public.jsonl")
    python(
        out,
        "-m torchtitan_dp.train --job.config_file public.toml --job.dump_folder runs/public "
        "--training.dataset_path corpus/public.jsonl --model.hf_assets_path shape "
        + (f"--training.steps {steps}" if steps else ""),
    )
    # The weights alone: the export's privacy.json says "not private", which is right of a run
    # without privacy and would count for every run that starts from it. These saw public text only.
    (out / "base").mkdir(exist_ok=True)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    for name in names:
        shutil.copy2(out / "runs" / "public" / "hf" / name, out / "base" / name)


def write_model_files(folder: Path, public: Path) -> None:
    """Write config.json and a tokenizer that is learned from the public text alone."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = (json.loads(line)["text"] for line in public.read_text("utf-8").splitlines())
    tokenizer = ByteLevelBPETokenizer()
    marks = [*MARKS.values()]  # the first ids
    terms = {"vocab_size": SHAPE["vocab_size"], "special_tokens": marks, "show_progress": False}
    tokenizer.train_from_iterator(texts, **terms)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | MARKS))
    (folder / "config.json").write_text(json.dumps(SHAPE))


def do(out: Path, run: Run, steps: int | None) -> Run:
    """Take a run again, unless it has been; return its numbers."""
    path, folder = out / "results" / f"{run['name']}.json", out / "runs" / run["name"]
    if path.exists():
        found: Run = json.loads(path.read_text())
        return found
    numbers: Run = {key: run[key] for key in ("name", "arm", "options") if key in run}
    weights = out / "base"
    if "options" in run:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
        options = re.sub(r"--job.config_file \S+", "--job.config_file private.toml", run["options"])
        options += f" --training.steps {steps}" if steps else ""
        python(out, f"-m torchtitan_dp.train {options}")
        weights = folder / "hf"
        if run["arm"]["kind"] != "plain":
            numbers["privacy"] = spent(folder)
    numbers |= heldout_losses(weights, out / "corpus" / "heldout", 3 if steps else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    return numbers


def spent(folder: Path) -> Run:
    """Return what a private run spent."""
    published = json.loads((folder / "privacy.json").read_text())
    return {key: published[key] for key in ("epsilon", "delta", "noise_multiplier", "sample_rate")}


def python(out: Path, arguments: str) -> None:
    """Run a command of the package in `out`, in a process of its own, which is all of its mesh."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **alone, **place, "PYTHONPATH": paths}
    command = [sys.executable, *arguments.split()]
    subprocess.run(command, cwd=out, env=environment, check=True, stdout=subprocess.DEVNULL)


def heldout_losses(weights: Path, records: Path, most: int | None = None) -> Run:
    """Return the mean over records of their mean loss, and the mean over tokens of each bucket.

    A plain forward pass over the first `SEQ_LEN` tokens of each, without the trainer's data path.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    tokenizer, sums = AutoTokenizer.from_pretrained(weights), np.zeros((2, SEQ_LEN))
    means = []
    for path in sorted(records.rglob("*.py"))[:most]:
        text = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False)
        ids = [tokenizer.bos_token_id, *text, tokenizer.eos_token_id]
        losses = token_losses(model, torch.tensor(ids[: SEQ_LEN + 1])).numpy()
        sums[:, : len(losses)] += losses, np.ones_like(losses)
        means.append(float(losses.mean()))
    total, tokens = sums.reshape(2, -1, BUCKET).sum(2)
    by_position = (total / np.maximum(tokens, 1)).round(5).tolist()
    return {"loss": float(np.mean(means)), "by_position": by_position, "records": len(means)}


def token_losses(model: Any, ids_T: Any) -> Any:
    """Return the cross-entropy of each id after the first, fp32."""
    import torch

    with torch.no_grad():
        logits_TV = model(input_ids=ids_T[None, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits_TV.float(), ids_T[1:], reduction="none")


# The page.


def read(docs: Path) -> list[Run]:
    runs: list[Run] = json.loads((docs / "results" / "runs.json").read_text())["runs"]
    return runs


def report(docs: Path, out: Path | None) -> None:
    """Put the numbers of `out` into runs.json, and make the page's tables."""
    if out is not None:
        found = [json.loads(path.read_text()) for path in sorted((out / "results").glob("*.json"))]
        weights = (out / "base" / "model.safetensors").read_bytes()
        start = json.loads((out / "corpus" / "corpus.json").read_text())
        start["starting_weights_sha256"] = hashlib.sha256(weights).hexdigest()
        runs = ",\n".join(json.dumps(run) for run in found)
        text = f'{{"start": {json.dumps(start)},\n"runs": [\n{runs}\n]}}\n'
        (docs / "results" / "runs.json").write_text(text, "utf-8")
    page, made = docs / "results.md", tables(docs)
    page.write_text(filled_in(page.read_text(), {name: made[name] for name in ON_THE_PAGE}))
    (docs / "results" / "losses.svg").write_text(picture(read(docs)), "utf-8")


def picture(runs: list[Run]) -> str:
    """Draw the main table's medians, all weights trained, as bars in an SVG for light and dark."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = by_setting(runs)
    main = [r for r in rows if not r["rank"] and len(r["runs"]) == 3]
    private = sorted((r for r in main if r["kind"] == "private"), key=lambda r: r["epsilon"])
    plain = min((r for r in main if r["kind"] == "plain"), key=lambda r: r["loss"])
    untuned = next(r for r in rows if r["kind"] == "none")
    names = ["no tuning", *(f"ε = {r['epsilon']:g}" for r in private), "without privacy"]
    losses = [row["loss"] for row in (untuned, *private, plain)]
    colours = ["#8b949e", *["#2f81f7"] * len(private), "#3fb950"]
    grey = {"text.color": "#7d8590", "svg.fonttype": "none", "svg.hashsalt": "losses"}
    buffer = io.StringIO()
    with matplotlib.rc_context(grey):
        figure = Figure(figsize=(6.4, 2.4), layout="constrained")
        axes = figure.subplots()
        drawn = axes.barh(names, losses, color=colours)
        axes.bar_label(drawn, [f"{loss:.2f}" for loss in losses], padding=4)
        axes.set_title("held-out loss, nats a token (less is better)", fontsize="medium")
        axes.set_xlim(0, 1.12 * max(losses))
        axes.invert_yaxis()
        axes.tick_params(colors="#7d8590", length=0, labelbottom=False)
        axes.spines[:].set_visible(False)
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=unsaid)
    return buffer.getvalue()


def filled_in(page: str, made: dict[str, str]) -> str:
    """Put each table between its two marks."""
    for name, text in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        assert page.count(begin) == page.count(end) == 1, name
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def by_setting(runs: list[Run]) -> list[Run]:
    """Group runs that differ in nothing but their seed: their settings, `runs`, median `loss`, and
    `closed`, its share of the way from no tuning to the best without privacy."""
    found: dict[str, Run] = {}
    for run in runs:
        arm = USUAL | run["arm"]
        terms = {**arm, "sigma": run.get("privacy", {}).get("noise_multiplier"), "runs": []}
        name = json.dumps({key: arm[key] for key in sorted(arm) if key != "seed"})
        found.setdefault(name, run.get("privacy", {}) | terms)["runs"].append(run)
    for row in found.values():
        row["loss"] = statistics.median(run["loss"] for run in row["runs"])
    untuned = max(row["loss"] for row in found.values() if row["kind"] == "none")
    plain = (row for row in found.values() if row["kind"] == "plain" and len(row["runs"]) == 3)
    best = min(row["loss"] for row in plain)
    for row in found.values():
        row["closed"] = (untuned - row["loss"]) / (untuned - best)
    order = ("epsilon", "rank", "batch", "bands", "optimizer", "beta1", "max_grad_norm", "lr")
    kinds = [*TITLES]
    return sorted(found.values(), key=lambda r: [kinds.index(r["kind"]), *(r[k] for k in order)])


def title(row: Run) -> str:
    alone = ", B alone" * row["freeze_a"]
    weights = f"LoRA, rank {row['rank']}{alone}" if row["rank"] else "all weights"
    what = "" if row["kind"] == "none" else f", {weights}"
    return TITLES[row["kind"]].format(row["epsilon"]) + what


def spread(row: Run) -> str:
    """Write the median loss, with least and most where there are several."""
    losses = [run["loss"] for run in row["runs"]]
    more = f" ({min(losses):.3f}–{max(losses):.3f})" if len(losses) > 1 else ""
    return f"{row['loss']:.3f}{more}"


def at(place: int) -> Callable[[Run], str]:
    """Return a column: the median of the losses in one bucket of positions."""
    return lambda r: f"{statistics.median(run['by_position'][place] for run in r['runs']):.3f}"


ON_THE_PAGE = ("main", "positions")
USUAL = {"bands": 1, "optimizer": "AdamW", "beta1": 0.9, "freeze_a": False}
BUCKETS = {f"{i * BUCKET:,}–{(i + 1) * BUCKET - 1:,}": at(i) for i in range(SEQ_LEN // BUCKET)}
COLUMNS: dict[str, Callable[[Run], str]] = {
    "tuning": title,
    "batch × steps": lambda r: f"{r['batch']} × {r['steps']}" if r["lr"] else "",
    "learning rate": lambda r: f"{r['lr']:.2g}" if r["lr"] else "",
    "C": lambda r: f"{r['max_grad_norm']:g}" if r["sigma"] else "",
    "noise": lambda r: f"{r['bands']} bands" if r["bands"] > 1 else "",
    "optimizer": lambda r: f"{r['optimizer']}, β₁ = {r['beta1']:g}" if r["lr"] else "",
    "σ": lambda r: f"{r['sigma']:.3f}" if r["kind"] == "private" else "",
    "held-out loss": spread,
    "gap closed": lambda r: f"{r['closed']:.0%}",
    **BUCKETS,
}


def table(rows: list[Run], *names: str) -> str:
    lines = [names, ["---"] * len(names), *([COLUMNS[name](row) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(docs: Path) -> dict[str, str]:
    """Return all tables in Markdown, by name; those `ON_THE_PAGE` by the names of their marks."""
    runs = by_setting(read(docs))
    result, shape = ("held-out loss", "gap closed"), ("tuning", "batch × steps")
    rates = ("noise", "optimizer", "C", "learning rate", "σ", *result)
    main = [r for r in runs if len(r["runs"]) == 3 or r["kind"] == "none"]
    by_place = [r for r in main if not r["rank"] and (r["kind"] != "plain" or r["closed"] == 1)]
    return {
        "main": table(main, *shape, *rates),
        "positions": table(by_place, "tuning", *BUCKETS),
        "tried": table(runs, *shape, *rates),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
