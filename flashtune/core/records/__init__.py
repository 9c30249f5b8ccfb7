"""Measured results: records, how near they are to a problem, and problems that models call."""
