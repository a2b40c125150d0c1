"""Benchmarks: tasks of EleutherAI's lm-evaluation-harness, sampled or scored by this process's engine.

    TaskSpec -> harness.load: HarnessBenchmark -> sitting.take (engine, Judge in workers) -> results.SuiteResult

The harness provides tasks with their prompts, filters and metrics. This package samples all questions of a task at
once, with a seed per question, and computes pass@k from several completions. Metrics have a time limit. Code that the
model wrote runs in separate processes. Only `harness`, `judging` and `results` import lm_eval, when a task is loaded.
"""

HOOKS = {"benchmark_names": "specs:names_of", "benchmark": "sitting:with_benchmarks"}
