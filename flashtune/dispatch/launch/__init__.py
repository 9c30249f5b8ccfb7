"""Launches of variants through the driver: host code planned once, parameters written at each call."""
