"""Benchmarks of flashtune: cases, what they share, and fits of models (`run.py`)."""
