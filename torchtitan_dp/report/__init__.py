"""One HTML page on a run, and what of it may be published."""
