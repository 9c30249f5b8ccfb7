"""The forward pass for few query rows: the family `flash_decode`."""
