"""Proposals: a problem's space, samplers over it, and the study that stores each candidate's outcome."""
