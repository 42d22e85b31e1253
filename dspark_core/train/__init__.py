"""The trainer: data, cached features, fitting a draft. Reads and writes files; knows nothing of HTTP or requests."""
