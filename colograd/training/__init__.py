"""From scored groups to a trained policy, and what surrounds it.

`task` makes ready what a trainer is given, `assembly` builds the engine beside the policy, `closing` sees to the end of
what was built. `step_batches` cuts scored groups into optimizer steps, `loss_pass` sends a step's micro-batches through
the loss, `adamw_split` (with `adamw_fused`) is the optimizer. `transformers_seam` and `checkpointed_trainer` are
`transformers.Trainer` for packed rows, `checkpointer` saves and loads its checkpoints; `journaling` what the journal
must hold for, and when it is pruned, `replaying` which of its steps can be trained again, and whether they come out
alike. `recording` is what the run's record is told, `utilisation` the FLOPs of a step. `evaluating` is `evaluate`,
`evaluation` what it reports, `trl_names` what TRL's users ask a trainer.
"""
