"""Any causal language model of `transformers`, as it is there: its modules, names and files."""
