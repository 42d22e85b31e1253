"""Model folders: finding them by reference, the demo target, tokenizers and weights."""
