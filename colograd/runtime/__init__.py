"""The process and its imports: what is set before torch and vLLM read it, and how objects are found by name.

`process` sets threads, rank variables and quiet logs; `waiting` shows what a start waits for; `gpus` looks for GPUs
without torch; `importing` finds what a user names by import path, and puts off what others import in vain; `hub` asks
whether a model's or a dataset's name leads anywhere; `sizes` reads those of a model's configuration; `trl_scripts` has
what TRL's scripts import beside the trainer; `page_locked` is host memory that a GPU reads and writes by itself.
"""
