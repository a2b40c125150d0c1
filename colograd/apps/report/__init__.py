"""The page of a run, made from its files without torch. `RecordedRun` and `Samples` read the files, `page` writes
one HTML file, `serving` shows it live. The page's scripts are in `assets/`.
"""

from .page import write_report
