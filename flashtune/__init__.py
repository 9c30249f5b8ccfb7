"""flashtune: find the fastest attention kernel for your GPU and your shapes, and ship that knowledge."""

__version__ = "0.1.0"
