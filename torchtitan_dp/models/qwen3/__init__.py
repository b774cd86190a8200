"""The dense models of the Qwen3 family: heads of a size of their own, norms of queries and keys."""
