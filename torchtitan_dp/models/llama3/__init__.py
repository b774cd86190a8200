"""The Llama 3 family: the `model` and its sizes, and how `parallelize` lays it over the mesh."""
