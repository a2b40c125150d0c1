"""Benchmarks: tasks of EleutherAI's lm-evaluation-harness, sampled or scored by this process's engine.

    TaskSpec -> HarnessBenchmark -> sitting.take (engine, Judge in workers) -> results.SuiteResult

The harness provides tasks with their prompts, filters and metrics. This package samples all questions of a task at
once, with a seed per question, and computes pass@k from several completions. Metrics are computed in worker processes
with a time limit. For the metric `code_eval` the model's code runs in a further process.
"""

HOOKS = {"benchmark_names": "specs:names_of", "benchmark": "sitting:with_benchmarks"}
