"""The forward pass with a query tile to a program: the families `flash_fwd` and `flash_fwd_tma`."""
