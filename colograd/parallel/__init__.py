"""Several ranks: who is who, what they agree on, and what they exchange.

`layout` says which ranks share an engine, a shard of the weights, a node; `ranks` makes ranks fail together, and
`faults` those too that wait for a failed one; `watchdog` notices one that makes no progress. `gradients` sums
gradients; `balance` moves groups from slow ranks to fast ones. `lockstep` lets one rank of an engine lead and the
others follow. `rank_notes` are what ranks' other threads leave each other.
"""
