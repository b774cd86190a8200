"""Samples of records whose tokens may not move: every format, reading and way to take a unit.

    python -m tests.references.samples FILE.json      with PYTHONPATH at the tree to look at

All take the beginning of a long record (`data.long_records = "head"`). The files have broken rows,
empty records, records of no unit and records longer than a sample. Turns of a chat are short: of
one longer than 8 bytes a token of the sample, a92ccd9 left out later turns. At that commit
`build_samples` is in `train.spec`, and takes the tokenizer too.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tokenizers

from tests.data import chats
from tests.data.drawn import sample
from torchtitan_dp.config.load import load_config
from torchtitan_dp.data.batching import FIXED_KEY
from torchtitan_dp.privacy.sampling import choices
from torchtitan_dp.train.check import build_samples, open_records

WORDS = "the patient was seen in a ward and has no pain; naïve 数字 of her notes\nare 12 mg, "
MERGES = "Ġ t|h e|Ġt he|i n|e n|Ġ a|Ġa n|Ġan d|o t|ot e|Ġ p|Ġp a|t i|ti en|tien t|Ġ w|e r|s e"
TOKENIZERS = ("bytes", "marks", "no_marks", "plain", "marked")
SEQ_LENS = (48, 300)


def text(number: int, salt: int = 0) -> str:
    """A text of 0 to 900 words, most of them short."""
    rng, words = np.random.default_rng([number, salt]), WORDS.split(" ")
    count = [0, 3, 12, 40, 150, 900][int(rng.integers(6))] if number % 7 else 0
    return " ".join(words[i] for i in rng.integers(len(words), size=count))


def rows(count: int = 60) -> list[dict[str, object]]:
    """Rows with a text, a prompt, a chat and a unit, some of which are missing."""
    found: list[dict[str, object]] = []
    for number in range(count):
        turns = [text(number, 10 + turn)[:180] or "ok" for turn in range(number % 6)]
        row: dict[str, object] = {
            "text": text(number),
            "prompt": text(number, 1),
            "messages": chats.chat(*turns, system="Be brief." if number % 4 == 0 else None),
            "user": f"u{number * 7 % 11}",
        }
        if number % 13 == 5:
            row["user"] = None
        if number % 17 == 3:
            row["text"] = row["messages"] = None
        found.append(row)
    return found


def write(folder: Path) -> None:
    """Write the same rows in every format, and texts in folders."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    every = rows()
    lines = [json.dumps(row).encode() for row in every]
    lines[20:20] = [
        b"",
        b'{"text": "torn',
        b'{"text": "\xff"}',  # with a user it was nobody's there, and is the user's (row 83)
        b"[1]",
        b'{"text": 7}',
    ]
    for name, part in (("a", lines[:30]), ("b", lines[30:])):
        (folder / "lines").mkdir(exist_ok=True)
        (folder / f"lines/{name}.jsonl").write_bytes(b"\n".join(part) + b"\n" * (name == "a"))
    table = pa.Table.from_pylist(every)
    broken = pa.array(
        [
            b"\xff\xfe" if i == 8 else str(v).encode()
            for i, v in enumerate(table["text"].to_pylist())
        ]
    )
    texts = pa.Array.from_buffers(pa.string(), len(broken), broken.buffers())
    table = table.set_column(table.schema.get_field_index("text"), "text", texts)
    (folder / "tables").mkdir()
    pq.write_table(table[:25], folder / "tables/a.parquet", row_group_size=7)
    pq.write_table(table[25:], folder / "tables/b.parquet", row_group_size=100)
    (folder / "saved").mkdir()
    (folder / "saved/state.json").write_text(STATE)
    with pa.ipc.new_stream(str(folder / "saved/data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=9)
    for number in range(30):
        place = folder / f"texts/p{number * 5 % 8}/{number}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text(number), encoding="utf-8")
    (folder / "texts/in_no_folder.txt").write_text("of nobody")
    (folder / "texts/p1/latin.txt").write_bytes("naïve".encode("latin1"))
    (folder / "texts/p2/mark.txt").write_text("with a mark", encoding="utf-8-sig")


def write_tokenizers(folder: Path) -> None:
    """Write tokenizers of bytes and of merged bytes, with marks or not, and of chats."""
    chats.folder(folder / "plain", chats.PLAIN)
    chats.folder(folder / "marked", chats.MARKED)
    base = tokenizers.Tokenizer.from_file(str(folder / "plain/tokenizer.json"))
    vocabulary = dict(sorted(base.get_vocab().items(), key=lambda item: item[1])[:256])
    pairs = [(one.split(" ")[0], one.split(" ")[1]) for one in MERGES.split("|")]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for name, marks in (("no_marks", {}), ("marks", {"bos_token": "<s>", "eos_token": "</s>"})):
        (folder / name).mkdir()
        backend.add_special_tokens(list(marks.values()))
        backend.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps(marks))


STATE = '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
PLACES = {"jsonl": "lines", "parquet": "tables", "hf": "saved", "text": "texts"}
READINGS = {
    "text": (),
    "prompt": ("--data.prompt_field=prompt",),
    "messages": ("--data.messages_field=messages",),
}
UNITS = {
    "records": ("", 1, ()),
    "concat": ("unit", 1, ("--data.unit_sampling=concat",)),
    "random": ("unit", 1, ("--data.unit_sampling=random",)),
    "three": ("unit", 3, ("--data.unit_sampling=random", "--data.windows_per_draw=3")),
}
CASES = {
    f"{format}, {reading}, {tokenizer}, {units}, {seq_len}": (
        format,
        reading,
        tokenizer,
        units,
        seq_len,
    )
    for format in PLACES
    for reading in (READINGS if format != "text" else ("text",))
    for tokenizer in TOKENIZERS
    for units in UNITS
    for seq_len in SEQ_LENS
    if (tokenizer in ("plain", "marked")) == (reading == "messages")
}


def digest(case: str, folder: Path) -> str:
    """Hash the tokens and labels of all units' samples, of those to train on and of the others."""
    format, reading, tokenizer, units, seq_len = CASES[case]
    field, windows, options = UNITS[units]
    if field:
        options += (f"--data.unit_field={'folder' if format == 'text' else 'user'}",)
    config = load_config(
        [
            f"--training.dataset={format}",
            f"--training.dataset_path={folder / PLACES[format]}",
            f"--training.seq_len={seq_len}",
            f"--model.hf_assets_path={'' if tokenizer == 'bytes' else folder / tokenizer}",
            *("--data.long_records=head", "--data.heldout_fraction=0.2"),
            *("--privacy.noise_multiplier=1", "--privacy.delta=1e-3"),
            *("--privacy.gradient_method=microbatch", "--training.global_batch_size=2"),
            *READINGS[reading],
            *options,
        ],
        1,
    )
    records = open_records(config)
    samples = build_samples(records, config)
    found = hashlib.sha256()
    for which, positions in (("train", records.train), ("held out", records.heldout)):
        found.update(f"{which} {len(positions)}".encode())
        for position, unit in enumerate(positions.tolist()):
            for window in range(windows):
                rng = choices(FIXED_KEY, position, secure=False) if samples.is_random else None
                tokens_T, labels_T = sample(samples, unit, None, rng, window, windows)
                for part in (tokens_T, labels_T):
                    found.update(part.numpy().astype("<i8").tobytes())
    return found.hexdigest()


def main(file: str) -> None:
    """Write all cases' hashes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        write(folder)
        write_tokenizers(folder)
        Path(file).write_text(json.dumps({case: digest(case, folder) for case in CASES}, indent=0))


if __name__ == "__main__":
    main(sys.argv[1])
