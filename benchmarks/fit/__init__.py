"""Fits of the models that predict the times of kernels, from committed sweeps, trials and runs; none needs a GPU."""
