"""Tensor-parallel training (`sharding: tensor`): ranks divide the policy's layers like the ranks of a vLLM engine."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "loaded_policy": "model:check_policy",
    "model_feature": "model:InEngineLayout",
    "sharding:tensor": "strategy:TensorParallel",
    "sharding:tensor+optimizer": "strategy:TensorOptimizer",
    "sharding:tensor+gradients": "strategy:TensorGradients",
    "weights_in_parts": "strategy:weights_in_parts",
}
