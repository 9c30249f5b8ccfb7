"""Plans: kernels and PyTorch's operations prepared for calls of one signature, forward and backward, and what launches need."""
