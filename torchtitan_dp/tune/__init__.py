"""A search for a recipe by published held-out losses, at an epsilon of all trials together.

`trials`: what is tried, with how much noise; `folder`: what a search keeps, so that it goes on;
`__main__`: runs the trials, and compares them.
"""
