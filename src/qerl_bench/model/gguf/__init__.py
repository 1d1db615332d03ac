"""GGUF files: what they say of a model, their blocks, and copies drawn inside of rounding cells."""
