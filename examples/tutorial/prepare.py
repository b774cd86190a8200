"""Writes what docs/tutorial.md needs: made-up notes of patients, and a small pre-trained Llama.

    python examples/tutorial/prepare.py FOLDER

FOLDER gets `notes.parquet` (patient_id, date, note) and `model/`, a Hugging Face folder as a
download has it. The model is trained for a minute on text of the same kind about other people, in
the place of a real one, so that nothing has to be downloaded.
"""

import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PATIENTS, NOTES, LENGTH, STEPS = 600, 4, 64, 300
COMPLAINTS = ("cough", "headache", "back pain", "fever", "dizziness", "a rash", "insomnia")
FINDINGS = ("nothing unusual", "mild inflammation", "raised blood pressure", "a viral infection")
ADVICE = ("rest", "a blood test", "physiotherapy", "a chest X-ray", "ibuprofen 400 mg")
OURS = ("a chest X-ray", "ibuprofen 400 mg")  # the habits of the hospital with the private notes


def note(rng: random.Random, advice: tuple[str, ...]) -> str:
    """Return the text of one visit."""
    return (
        f"Complains of {rng.choice(COMPLAINTS)} for {rng.randrange(2, 15)} days. Temperature "
        f"{rng.uniform(36, 39):.1f}. Examination: {rng.choice(FINDINGS)}. Advised "
        f"{rng.choice(advice)}."
    )


def write_records(path: Path) -> None:
    """Write the private notes, one a row, several a patient."""
    rng = random.Random(0)
    rows = [
        {
            "patient_id": f"P{patient:04}",
            "date": f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
            "note": note(rng, OURS),
        }
        for patient in range(PATIENTS)
        for _ in range(rng.randrange(1, NOTES + 1))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    print(f"{len(rows)} notes of {PATIENTS} patients: {path}")


def write_model(folder: Path) -> None:
    """Pre-train a Llama on public text of the same kind, and save it with its tokenizer."""
    rng = random.Random(1)
    texts = [note(rng, ADVICE) for _ in range(4000)]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    learned.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learned, bos_token=special[0], eos_token=special[1], pad_token=special[1]
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    tokens = [tokenizer.bos_token_id, *tokenizer.encode(" ".join(texts), add_special_tokens=False)]
    count = len(tokens) // LENGTH
    samples = torch.tensor(tokens[: count * LENGTH]).view(count, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        batch = samples[torch.randint(count, (32,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"pre-training: step {step + 1} of {STEPS}, loss {loss.item():.2f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"a Llama of {model.num_parameters():,} parameters: {folder}")


def main(folder: str) -> None:
    """Write both."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    write_records(place / "notes.parquet")
    write_model(place / "model")


if __name__ == "__main__":
    main(*sys.argv[1:])
