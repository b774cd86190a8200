"""The mathematics of differential privacy: keys, sampling, noise and accounting, a file each."""
