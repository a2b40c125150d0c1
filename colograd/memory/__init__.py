"""Plan of a device's memory, and the alternate use of the memory by engine (sampling) and policy (training)."""
