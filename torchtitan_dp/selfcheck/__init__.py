"""Whether this machine computes it right: each part of a private step against a plain reference."""
