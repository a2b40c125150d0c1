"""The list of extensions: features outside the core. Each folder or file can be deleted, and its line here may stay.

The core calls `runtime.registry.hooks` with the name of a seam, a place where extensions can add code. An extension's
`__init__.py` or file has ``HOOKS``, a dict from seams to "module:attribute" (":attribute" is in the same file).
"""

# If several extensions have a hook at one seam, the hooks run in the order of these names.
EXTENSIONS = (
    "reference",  # `reference` is first: its KL term is added to the losses before a teacher's divergence
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
    "images",  # `images` is behind `kept_tokens`: older rollout logs have the tables of both in this order
    "launchers",
    "liger",
    "lora",
    "muon",
    "offload",
    "overlap",
    "quantized",
    "drafts",  # `drafts` is behind all extensions that observe vLLM's sampler
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
