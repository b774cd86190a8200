"""From private records to microbatches, in three stages.

`records`: bytes on disk to records, and `units`, which groups them; `samples`: a unit to token ids;
`batching` and `feed`: token ids to a step's microbatches. `dataset` opens the first two at once.
"""
