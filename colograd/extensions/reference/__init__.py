"""The KL term, and its reference policy."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "loaded_policy": "model:check_reference",
    "loss_term": "loss:kl_term",
    "second_model": "model:REFERENCE",
}
