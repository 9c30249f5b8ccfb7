"""Attention that libraries and PyTorch's backends provide."""
