"""Benchmarks: tasks of EleutherAI's lm-evaluation-harness, sampled or scored by the engine of this process.

    TaskSpec -> harness.load: HarnessBenchmark -> sitting.take (engine, Judge in workers) -> results.SuiteResult

The harness has the tasks, their prompts, filters and metrics. The rest is kept here: one queue per task and engine,
seeds per question, several completions per question with pass@k, time limits of checkers, and code that runs apart.
Only `harness`, `judging` and `results` import lm_eval, when a task is loaded.
"""

HOOKS = {"benchmark_names": "specs:names_of", "benchmark": "sitting:benchmark_of"}
