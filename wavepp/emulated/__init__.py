"""Emulated devices: the whole runtime for real, kernels replaced by waits of modelled length."""
