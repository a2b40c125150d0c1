"""Communication between ranks: who shares what, joint errors, failure detection, sums of gradients, load balancing.

`layout` defines which ranks share a vLLM engine, a shard of the weights, or a node. `ranks` raises a rank's error on
all ranks. `faults` ends ranks that wait in a collective for a failed rank. `watchdog` detects a rank that makes no
progress. `shards` sums gradients. `balance` moves groups from slow ranks to fast ranks. With `shards.Lockstep`, the
first rank of an engine decides and the engine's other ranks follow."""
