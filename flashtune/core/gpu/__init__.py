"""GPUs: their figures, and what kernels and PyTorch can take on them."""
