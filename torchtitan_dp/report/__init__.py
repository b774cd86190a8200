"""One HTML page on a run, from the files in its folder.

Modules: `charts` (TensorBoard's scalars, SVG), `run_folder` (settings, ledger, lock, checkpoints;
the status, also as text), `content` (of a page, and of a public one).
"""
