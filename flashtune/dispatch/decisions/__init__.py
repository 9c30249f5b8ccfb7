"""Decisions: the databases in force, what serves a call and why, calls that are recorded, and those that are measured."""
