"""What every room uses: a process, private names of PyTorch, collectives that are begun."""
