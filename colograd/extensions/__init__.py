"""Features outside the core. Each has a folder here and a line below; a folder can be deleted without a trace.

The core never imports an extension. It asks `runtime.registry.hooks` for what the extensions offer at one of its seams.
An extension's `__init__.py` names these offers in ``HOOKS``: seam -> "module:attribute" in its folder, or several.
"""

# The order of the names is the order of the hooks of one seam.
EXTENSIONS = (
    "agents",
    "best_model",
    "carry_over",
    "curriculum",
    "custom_rollouts",
    "distillation",
    "evaluation",
    "experts",
    "fsdp",
    "graders",
    "hybrids",
    "kept_tokens",
    "images",  # behind `kept_tokens`, as older versions read their tables in a record in this order
    "launchers",
    "liger",
    "lora",
    "muon",
    "offload",
    "overlap",
    "quantized",
    "drafts",  # behind those that watch the sampler
    "remedies",
    "recording",
    "reference",
    "reward_kl",
    "sequence_parallel",
    "streams",
    "tensor_parallel",
    "token_weights",
    "tools",
    "trl_names",
)
