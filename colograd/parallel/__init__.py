"""Communication between ranks: layout, joint errors, failure detection, sums of gradients, load balancing."""
