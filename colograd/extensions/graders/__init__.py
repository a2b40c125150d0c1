"""Rewards that need more than a text comparison: mathematical answers, an LLM judge over HTTP, reward models."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "reward_models": "models:with_models",
    "rewards": (
        "mathematics:math_answer_reward",
        "mathematics:accuracy_reward",
        "mathematics:reasoning_accuracy_reward",
        "judge:judge",
    ),
}
