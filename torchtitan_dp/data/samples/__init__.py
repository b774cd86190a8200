"""From one privacy unit to one fixed-length sample: tokenizer, chat template, excerpts."""
