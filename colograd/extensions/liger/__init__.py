"""Liger's Triton kernels in the policy (`use_liger_kernel`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {
    "conflicts": "conflicts:CONFLICTS",
    "kernels": "kernels:liger_of",
    "model_feature": "kernels:Liger",
}
