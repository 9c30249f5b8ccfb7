"""Masks and scores as code: traced, decided, with their lists of blocks, and launched."""
