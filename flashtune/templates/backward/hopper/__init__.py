"""Attention backward for Hopper: one kernel that adds dQ up in memory, or two that are repeatable."""
