"""An environment with tools: move money between accounts in the rollout's state. The final balances are rewarded."""

import verifiers.v1 as vf
from pydantic import Field


class LedgerState(vf.State):
    balances: dict[str, int] = Field(default_factory=dict)


class LedgerData(vf.TaskData):
    start: dict[str, int]
    goal: dict[str, int]


class BankToolset(vf.Toolset[vf.ToolsetConfig, LedgerState]):
    TOOL_PREFIX = "bank"

    async def setup_task(self, task: LedgerData) -> None:
        self.start = task.start

    @vf.tool
    def balance(self, account: str) -> str:
        """The balance of an account."""
        return str((self.state.balances or self.start)[account])

    @vf.tool
    def transfer(self, source: str, target: str, amount: int) -> str:
        """Move money from one account to another."""
        balances = self.state.balances or dict(self.start)
        if amount <= 0 or balances[source] < amount:
            return f"refused: {source} holds {balances[source]}"
        balances[source] -= amount
        balances[target] += amount
        self.state.balances = balances
        return f"moved {amount}"


class LedgerConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LedgerTask(vf.Task[LedgerData, LedgerState, LedgerConfig]):
    @classmethod
    def toolsets(cls, config: LedgerConfig) -> list[vf.Toolset]:
        return [BankToolset(config.tools)]

    @vf.reward
    async def balanced(self, trace: vf.Trace) -> float:
        return float((trace.state.balances or self.data.start) == self.data.goal)

    @vf.reward(weight=-0.1)
    async def needless_calls(self, trace: vf.Trace) -> float:
        return float(max(0, len(trace.tool_messages) - 2))


class LedgerTasksetConfig(vf.TasksetConfig):
    task: LedgerConfig = LedgerConfig()


class LedgerTaskset(vf.Taskset[LedgerTask, LedgerTasksetConfig]):
    def load(self) -> list[LedgerTask]:
        return [
            LedgerTask(
                LedgerData(
                    prompt=f"Move {amount} from alice to bob.",
                    start={"alice": 100, "bob": amount},
                    goal={"alice": 100 - amount, "bob": 2 * amount},
                ),
                self.config.task,
            )
            for amount in range(5, 55, 5)
        ]


__all__ = ["LedgerTaskset"]
