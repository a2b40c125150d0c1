"""The page of a run, made of its files without torch: `RecordedRun` and `Samples` read them, `payload` chooses what the
page shows, `page` writes one HTML file, `serving` shows it live. The page's scripts lie in `assets/`.
"""

from .page import write_report
