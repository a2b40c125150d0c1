"""Publishing: how a step's weights become the engine's. One file per way; `plan.publisher` picks one.

A way is a class with ``publish(version) -> int`` (bytes moved), which leaves the engine stamped with that version, and
``describe() -> str``, one line for the start of a run.
"""

from .plan import Publisher, publisher

__all__ = ["Publisher", "publisher"]
