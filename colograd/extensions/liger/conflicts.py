"""Settings that can't be combined with Liger's kernels."""

from __future__ import annotations

from ...config.conflicts import ANY, LIGER_LOSSES, SET, Conflict

CONFLICTS = (
    Conflict("torch_compile", SET, "use_liger_kernel", SET,
             "each fuses the same parts of a layer", "set one of them to false"),
    *(
        Conflict(f"liger_kernel_config.{loss}", SET, "", ANY,
                 "that replaces the model's own loss, and log-probabilities are computed from its hidden states",
                 "remove it")
        for loss in LIGER_LOSSES
    ),
)  # fmt: skip
