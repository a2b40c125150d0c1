"""Programs that use the package: reports, memory plan, replay, evaluation, export, doctor and others."""

HOOKS = {"report": "report:write_report"}
