"""One HTML page on a run, from the files in its folder.

Modules: `run_folder` (settings, ledger, lock, checkpoints, TensorBoard's scalars; the status, also
as text), `charts` (SVG), `content` (of a page, and of a public one).
"""
