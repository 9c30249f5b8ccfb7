"""Parts of PyTorch that flashtune needs: devices, types, attention, and private names."""
