"""The log-probabilities of given texts, from vLLM."""
