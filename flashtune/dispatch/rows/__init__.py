"""Packed sequences and paged caches: read, chosen, launched, and computed sequence by sequence."""
