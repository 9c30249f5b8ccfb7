"""Interfaces of `attention` to PyTorch: operators for torch.compile, and a function with gradients."""
