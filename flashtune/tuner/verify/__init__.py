"""Correct before fast: what candidates are checked on, and how close is right."""
