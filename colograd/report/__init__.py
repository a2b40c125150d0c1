"""The page of a run: `lines` reads its files as they grow, `values` takes them for what they should be, `reading` makes
a run of them, `samples` finds its completions, `payload` says what a page is told, `page` writes it as one file,
`serving` shows it live. What the page does stands in `assets/`. Nothing here imports torch.
"""

from .page import write_report
