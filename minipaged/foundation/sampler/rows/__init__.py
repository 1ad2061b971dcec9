"""What the kernels of the sampler share."""
