"""One file per run: what, not how."""
