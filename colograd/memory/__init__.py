"""Plan and use of a rank's device memory by the engine, which samples, and the policy, which is trained."""
