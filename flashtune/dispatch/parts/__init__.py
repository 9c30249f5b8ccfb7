"""Attention over parts of the keys, merged by LSE, and what is built on it: shared prefixes, trees of drafts, rings."""
