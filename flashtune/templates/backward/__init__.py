"""Families of the backward pass."""
