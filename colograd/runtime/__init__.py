"""The process and its imports: settings that torch and vLLM read once, and objects found by name.

`process` sets threads, rank variables and log levels; `waiting` shows the stage of a long start; `gpus` looks for GPUs
without torch. `importing` imports objects by path, and delays packages that may never be used. `hub` checks that a
model's or a dataset's name exists. `sizes` reads the sizes in a model's configuration. `trl_scripts` has names that
TRL's scripts import in addition to the trainer. `page_locked` allocates host memory that a GPU reads and writes by
itself.
"""
