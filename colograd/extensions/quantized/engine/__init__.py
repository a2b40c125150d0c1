"""The part of the extension `quantized` that imports vLLM."""
