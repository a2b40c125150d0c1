"""Programs that use the package: report, plan, replay, evaluation, doctor."""

HOOKS = {"report": "report:write_report"}
