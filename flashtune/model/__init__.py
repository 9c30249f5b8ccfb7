"""Tuning of a whole model: its attention calls recorded, searched, checked and measured, behind `flashtune model`."""
