"""Rewards by more than a completion's text: mathematics in a process of its own, a judge behind an address, models."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "reward_models": "models:with_models",
    "rewards": (
        "mathematics:math_answer_reward",
        "mathematics:accuracy_reward",
        "mathematics:reasoning_accuracy_reward",
        "judge:judge",
    ),
}
