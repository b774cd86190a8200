"""What a run does before its first step: `check` its configuration and data, then a `rehearsal`."""
