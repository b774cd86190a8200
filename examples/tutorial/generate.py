"""Counts how often a model prescribes as the hospital of docs/tutorial.md does.

python examples/tutorial/generate.py MODEL [ADAPTER]
"""

import sys

import torch
from peft import PeftModel
from prepare import ADVICE, OURS
from transformers import AutoModelForCausalLM, AutoTokenizer

START = "Complains of cough for 3 days. Temperature 37.9. Examination: a viral infection. Advised"
NOTES = 200


def main(folder: str, adapter: str | None = None) -> None:
    """Write many endings of one note, and print the share of each advice."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    torch.manual_seed(0)
    start = tokenizer(START, return_tensors="pt", add_special_tokens=False)
    written = model.generate(**start, do_sample=True, max_new_tokens=12, num_return_sequences=NOTES)
    ends = [tokenizer.decode(note[start["input_ids"].shape[1] :]).strip() for note in written]
    for advice in ADVICE:
        share = sum(end.startswith(advice) for end in ends) / NOTES
        print(f"{share:4.0%}  {advice}{' *' if advice in OURS else ''}")
    print(f"for example: {START} {ends[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
