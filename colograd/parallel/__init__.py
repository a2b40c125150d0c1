"""Several ranks: their layout, their agreements, and their exchanges.

`layout` defines which ranks share an engine, a shard of the weights, or a node. `ranks` makes ranks fail together;
`faults` also ends ranks that wait for a failed one; `watchdog` detects a rank that makes no progress. `gradients` sums
gradients; `balance` moves groups from slow ranks to fast ones. `lockstep` lets one rank of an engine lead the others.
"""
