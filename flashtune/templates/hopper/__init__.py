"""Kernels written for Hopper: the family `flash_fwd_hopper`, and the layout of its configs."""
