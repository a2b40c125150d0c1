"""Memory of a rank's device: its plan, and its alternate use by the engine (sampling) and the policy (training)."""
