"""The modules of `agents` that import vLLM."""
