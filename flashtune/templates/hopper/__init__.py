"""Kernels written for Hopper: the family `flash_fwd_hopper`, and what follows from its configs."""
