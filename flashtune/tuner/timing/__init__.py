"""Times on the GPU: candidates and the framework interleaved, finalists raced until each is decided."""
