"""The forward pass with a query tile to a program: the family `flash_fwd`."""
