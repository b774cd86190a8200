"""From private records to microbatches.

Once, before training, `prepare` reads the rows of files (`files`, `formats`), takes their texts
apart (`reading`, `chat_template`) and writes their tokens into a `store`, grouped into `units`.
`dataset` opens a run's data, and slices them into samples; `batching` makes microbatches.
"""
