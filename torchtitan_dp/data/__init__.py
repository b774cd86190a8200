"""From private records to one fixed-length sample a privacy unit."""
