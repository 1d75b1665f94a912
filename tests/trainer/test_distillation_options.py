"""Distillation recipes that are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_service import new_policy

from ngym.errors import ConfigError
from ngym.trainer.recipe import recipe_reader


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["algorithm.teacher=null"], "algorithm.teacher: name one"),
        (["algorithm.teacher.url=http://here"], "either path or url"),
        (["algorithm.shaping.skip_equal_groups=true"], "algorithm.shaping.skip_equal_groups: a teacher's scores"),
        (
            ["algorithm.loss={ratio: sequence, aggregation: sequence, anchor: trainer}"],
            "algorithm.loss.ratio: a teacher",
        ),
        (["algorithm.teacher.path=null", "algorithm.teacher.url=http://x", "algorithm.temperature=0.7"], "temperature"),
        (["rollouts.dynamic_sampling=2"], "rollouts.dynamic_sampling: it replaces groups"),
        (["algorithm.teacher.beta=0.5", "engine.sequence_parallel=2"], "engine.sequence_parallel: whole distributions"),
        (["algorithm.teacher.reward_coef=1"], "rollouts.group_size: group_mean compares"),
        (["algorithm.teacher={path: null, current_policy: true}"], "current_policy: without a hint"),
        (["algorithm.teacher.hint=x", "algorithm.teacher.beta=0.5"], "algorithm.teacher.beta: whole distributions are"),
        (["algorithm.teacher.several=[{url: 'http://x'}]"], "several: give path, url, current_policy and hint there"),
        (
            ["algorithm.teacher={path: null, several: [{url: 'http://x', agents: [calculator]}]}"],
            "no tasks are for an agent 'calculator' (did you mean 'calculator_agent'?)",
        ),
        (
            ["algorithm.teacher={path: null, several: [{url: 'http://x'}, {url: 'http://y'}], beta: 1.0}"],
            "algorithm.teacher.beta: whole distributions are those of one teacher",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(root: Path, tmp_path: Path, words: list[str], key: str) -> None:
    student = new_policy(root, tmp_path)
    fixed = [
        f"model.path={student}",
        "evaluation=null",
        f"algorithm.teacher.path={student}",
        "algorithm.teacher.beta=null",
    ]
    with pytest.raises(ConfigError) as refused:
        recipe_reader.read_recipe(["distillation.yaml"], [*fixed, *words])
    assert key in str(refused.value)
