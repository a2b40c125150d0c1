"""The modules of `drafts` that import vLLM."""
