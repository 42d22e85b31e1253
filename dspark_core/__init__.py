"""The mathematics of DSpark speculative decoding: models, heads, sampling, verification, checkpoints."""

__version__ = "0.1.0"
