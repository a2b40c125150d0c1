"""The part of this extension that touches vLLM."""
