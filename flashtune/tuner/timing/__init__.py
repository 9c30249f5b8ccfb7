"""Timing on the GPU: candidates and PyTorch interleaved, final candidates raced until each is decided."""
