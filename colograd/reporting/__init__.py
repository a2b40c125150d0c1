"""Console output, phase times and metrics of a run, and `Events`, which passes a run's events to logs and records."""
