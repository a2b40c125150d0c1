"""Benchmarks: tasks of EleutherAI's lm-evaluation-harness, sampled or scored by this process's engine.

    TaskSpec -> HarnessBenchmark -> sitting.take (engine, Judge in workers) -> results.SuiteResult

The harness provides prompts, filters and metrics. The engine samples a task's questions with equal sampling settings
together."""

HOOKS = {"benchmark_names": "specs:names_of", "benchmark": "sitting:with_benchmarks"}
