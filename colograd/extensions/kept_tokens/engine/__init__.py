"""The part of the extension `kept_tokens` that imports vLLM."""
