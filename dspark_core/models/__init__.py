"""Target decoders: configuration, layers, attention over paged KV memory."""
