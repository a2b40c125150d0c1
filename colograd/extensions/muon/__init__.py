"""Muon for the matrices of the policy's layers (`optim: muon`)."""

HOOKS: dict[str, str | tuple[str, ...]] = {"optimizer": "optimizer:muon_of"}
