"""The publishable part of a run, its claims and its model card (`card`)."""
