"""The experiment that shows what a private model is worth; `scripts/experiment.py` runs it."""
