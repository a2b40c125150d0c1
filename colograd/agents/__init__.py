"""Agents: programs of the user's that call the model over HTTP while it is trained.

`AgentSessions` (`sessions`) is the rollout source: it starts a program per completion (`usercode.programs`), serves the
engine to them on loopback for the length of a generation (`server`, `endpoint`), decodes their requests in the engine's
one queue (`decoding`), and makes each session a `Rollout` that is a tree (`tree`). `context` gives a request the very
token ids that its session has had, and `session` keeps what a session may do and did.
"""
