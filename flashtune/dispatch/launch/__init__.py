"""Launches through the driver: host code recorded once, parameters written at each call."""
