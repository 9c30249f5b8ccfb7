"""Masks and scores as code: a user's functions, traced to pointwise operations and written as Triton source.

`known.functions_of` gives rendering the source of a KernelSpec's hash. Tracing needs PyTorch, and is imported where a call has a function.
"""
