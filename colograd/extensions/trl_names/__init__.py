"""TRL's attributes of a trainer, for scripts and callbacks that read them."""

HOOKS: dict[str, str | tuple[str, ...]] = {"trainer_base": "attributes:TRLNames"}
