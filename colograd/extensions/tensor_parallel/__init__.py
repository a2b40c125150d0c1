"""Layers that are divided among the ranks of an engine, for training as for sampling."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "loaded_policy": "model:check_policy",
    "model_feature": "model:InEngineLayout",
    "sharding": ("strategy:TensorParallel", "strategy:TensorOptimizer", "strategy:TensorGradients"),
    "weights_in_parts": "weights:weights_in_parts",
}
