"""Where functions of the user run: reward functions and tools alike.

`calls` says how a call ended, runs async ones on one event loop, and limits the time of what runs in the trainer's own
thread. `threads` runs a tool's call or an environment's methods beside the engine. `worker_pool` starts, calls and
kills workers, `worker_process` is the program of a worker.
"""
