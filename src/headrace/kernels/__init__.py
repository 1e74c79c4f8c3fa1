"""Triton kernels of the GPU engine; importing this package alone does not need Triton."""
