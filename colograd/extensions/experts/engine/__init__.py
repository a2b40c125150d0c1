"""The part of the extension `experts` (mixtures of experts) that imports vLLM."""
