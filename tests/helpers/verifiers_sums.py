"""An environment of the package `verifiers`: sums, with a tool server that `python -m` runs."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    server_name = "adder"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds."""
        return str(a + b)


class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def answered_calls(self, trace: vf.Trace) -> float:
        """How many of the model's calls the tool has answered."""
        said = [message.content for branch in trace.branches for message in branch.messages if message.role == "tool"]
        return float(len(said))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(4):
            yield Sum(vf.TaskData(prompt=f"what is {number} and {number}?", system_prompt="Add."))


if __name__ == "__main__":
    Adder.run()
