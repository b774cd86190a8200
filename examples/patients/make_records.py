"""Writes made-up patient records: one note a line, several notes a patient.

    .venv/bin/python examples/patients/make_records.py FILE.jsonl

Nobody's data is in them, so that the example can be run and published by anybody.
"""

import json
import os
import random
import sys

PATIENTS, NOTES = 120, 4  # as many patients, and at most as many notes each
COMPLAINTS = ("cough", "headache", "back pain", "fever", "dizziness", "a rash", "insomnia")
FINDINGS = ("nothing unusual", "mild inflammation", "raised blood pressure", "a viral infection")
ADVICE = ("rest", "ibuprofen 400 mg", "a blood test", "physiotherapy", "to come back in a week")


def note(rng: random.Random) -> str:
    """Return the text of one visit."""
    return (
        f"Day {rng.randrange(365)}. Complains of {rng.choice(COMPLAINTS)} for "
        f"{rng.randrange(2, 15)} days. Temperature {rng.uniform(36, 39):.1f}. Examination: "
        f"{rng.choice(FINDINGS)}. Advised {rng.choice(ADVICE)}."
    )


def main(file: str) -> None:
    """Write the records, the same ones each time."""
    rng = random.Random(0)
    lines = [
        {"patient_id": f"P{patient:04}", "note": note(rng)}
        for patient in range(PATIENTS)
        for _ in range(rng.randrange(1, NOTES + 1))
    ]
    rng.shuffle(lines)
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(file, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"{len(lines)} notes of {PATIENTS} patients: {file}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_records.py FILE.jsonl")
    main(sys.argv[1])
