"""Where functions of the user run: reward functions and tools alike.

`outcome` says how a call ended. `event_loop` runs async functions, `threads` runs a tool's call or an environment's
methods beside the engine. `worker_pool` starts, calls and kills workers, `worker_process` is the program of a worker.
What runs in the trainer's own thread has a `time_limit`.
"""
