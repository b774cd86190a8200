"""One HTML page on a run, from the files in its folder.

Modules: `run_folder` (settings, ledger, lock, checkpoints), `scalars` (TensorBoard's files),
`charts` (SVG), `content` (what a page has, and what a public one may have), `status` (the block on
top, also as text).
"""
