"""A plan of a device's memory, and turns in which the engine (sampling) and the policy (training) use the memory."""
