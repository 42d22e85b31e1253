"""The endpoints that OpenAI's clients speak to, on top of the same engine."""
