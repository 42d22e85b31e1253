"""The kernels themselves, which Numba compiles. Only `build` and tests import this: servers load what it made."""
