"""The list of extensions: features outside the core, one folder or file each. It can be deleted; its line may stay.

The core calls `runtime.registry.hooks` with the name of a seam (a place that extensions can extend). An extension's
``HOOKS``, in its `__init__.py` or file, maps seams to "module:attribute", or to ":attribute" of the module itself.
"""

# If several extensions have a hook at one seam, the hooks run in the order of these names.
EXTENSIONS = (
    "reference",  # first: its KL term is added to the tokens' losses before a teacher's divergence
    "agents",
    "best_model",
    "carry_over",
    "curriculum",
    "custom_rollouts",
    "distillation",
    "dynamic_sampling",
    "evaluation",
    "experts",
    "fsdp",
    "graders",
    "hybrids",
    "kept_tokens",
    "images",  # behind `kept_tokens`: records of older versions have their tables in this order
    "launchers",
    "liger",
    "lora",
    "muon",
    "offload",
    "overlap",
    "quantized",
    "drafts",  # after all extensions that observe vLLM's sampler
    "remedies",
    "recording",
    "reward_kl",
    "sequence_parallel",
    "streams",
    "tensor_parallel",
    "token_weights",
    "tools",
    "trl_names",
)
