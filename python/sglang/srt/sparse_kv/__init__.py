"""Sparse attention over a host-resident KV cache, decoded two tokens at a time."""
