"""The part of the extension `experts` that imports vLLM."""
