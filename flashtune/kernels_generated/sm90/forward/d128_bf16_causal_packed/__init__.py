"""Generated kernels; the topmost README.md lists them."""
