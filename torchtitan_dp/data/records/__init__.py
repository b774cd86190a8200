"""From bytes on disk to records: formats, their stores, and the index of a data set's files."""
