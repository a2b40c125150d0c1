"""The KL term of the loss, and its reference: a frozen copy of the policy, or the policy with its initial adapter."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "loaded_policy": "model:check_reference",
    "loss_term": "loss:kl_term",
    "second_model": "model:REFERENCE",
}
