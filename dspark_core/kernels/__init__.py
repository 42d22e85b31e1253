"""Kernels for float32 models on a CPU, written in Python and compiled by Numba when they are first used."""
