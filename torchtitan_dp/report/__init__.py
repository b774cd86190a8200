"""One HTML page on a run, from the files in its folder.

Modules: `run_folder` (settings, ledger, lock, checkpoints; the status on top of the page, also as
text), `scalars` (TensorBoard's files), `charts` (SVG), `content` (of a page, and of a public one).
"""
