"""The part of the extension `images` that imports vLLM."""
