"""A single-turn environment: add two numbers, with the answer in `<answer>` tags."""

import re

import verifiers.v1 as vf

ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        answers = ANSWER.findall(trace.last_reply)
        return float(bool(answers) and int(answers[-1]) == self.data.answer)

    @vf.reward(weight=0.2)
    async def tagged(self, trace: vf.Trace) -> float:
        if "fail the rubric" in trace.last_reply:
            raise RuntimeError("this reward cannot be computed")
        while "hang the rubric" in trace.last_reply:
            pass
        return float(len(ANSWER.findall(trace.last_reply)) == 1)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 20
    """Number of tasks."""


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        system = "Answer in <answer></answer> tags."
        pairs = [(17 * i % 90 + 5, 31 * i % 80 + 7) for i in range(self.config.num_tasks)]
        return [
            SumTask(SumData(prompt=f"What is {a} + {b}?", system_prompt=system, answer=a + b), self.config.task)
            for a, b in pairs
        ]


__all__ = ["SumsTaskset"]
