"""Triton kernels for packed weights and what lies around them; each has a reference in PyTorch."""
