"""The loss's KL term (setting `beta`), and the reference policy that the term needs."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "loaded_policy": "model:check_reference",
    "loss_term": "loss:kl_term",
    "second_model": "model:REFERENCE",
}
