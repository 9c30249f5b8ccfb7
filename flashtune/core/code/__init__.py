"""Launches and machine code of kernels."""
