"""Benchmarks: tasks of EleutherAI's lm-evaluation-harness, sampled or scored by this process's engine.

    TaskSpec -> HarnessBenchmark -> sitting.take (engine, Judge in workers) -> results.SuiteResult

The harness provides prompts, filters and metrics. The engine samples all questions of a task that have equal sampling
settings in one call."""

HOOKS = {"benchmark_names": "specs:names_of", "benchmark": "sitting:with_benchmarks"}
