"""The forward pass over paged keys and values: the family `flash_paged`."""
