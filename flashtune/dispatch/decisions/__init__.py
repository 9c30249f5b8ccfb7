"""Decisions: what runs a call, and why."""
