"""From private records to microbatches.

Once, before training, `prepare` reads the rows of files (`files`, `formats`, `tables`), takes their
texts apart (`reading`, `chat_template`) and writes their tokens into a `store`, grouped into
`units`. Training slices them: `samples`, then `batching`. `dataset` opens a run's data.
"""
