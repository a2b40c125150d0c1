"""The HTML page of a run, made from the run's files without torch."""

from .page import write_report
