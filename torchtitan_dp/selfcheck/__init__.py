"""Checks of this machine: each part of a private step against a plain reference."""
