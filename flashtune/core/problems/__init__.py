"""Attention problems, the configs of kernels for them, and the reference that defines correct results."""
