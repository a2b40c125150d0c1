"""The HTML page of a run, made from the run's files without torch. `RecordedRun` and `Samples` read the files, `page`
writes an HTML file, and `serving` shows a live page. The page's scripts are in `assets/`."""

from .page import write_report
