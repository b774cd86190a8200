"""The checks of a run before its first step: of its configuration and data, and a rehearsal."""
