"""Where functions of the user run: reward functions and tools alike.

`worker_process` is the program of a worker, `worker_pool` starts, calls and kills workers. `event_loop` runs async
functions, `threads` runs a tool's call or an environment's methods beside the engine.
"""
