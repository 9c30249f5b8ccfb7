"""Verification of numbers before timing: cases, inputs and tolerances."""
