"""Algorithms by name: published settings, overridden keys, and algorithms of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ngym.errors import ConfigError
from ngym.trainer.recipe import algorithms, recipe_reader

FILE = ["model.path=data/letters/tokenizer", "evaluation=null"]


def recipe(*words: str, files: tuple[str, ...] = ("grpo.yaml",)) -> Any:
    return recipe_reader.read_recipe(files, [*FILE, *words])[0]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("grpo", {}),
        ("dr_grpo", {"advantage.estimator": "group_mean", "loss.aggregation": "fixed"}),
        ("dapo", {"loss.clip_high": 0.28, "loss.aggregation": "token", "shaping.drop_truncated": True}),
        ("gspo", {"loss.ratio": "sequence", "loss.aggregation": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4}),
        ("cispo", {"loss.surrogate": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0}),
        ("sapo", {"loss.surrogate": "sapo", "loss.aggregation": "sequence"}),
        (
            "rloo",
            {
                "advantage.estimator": "leave_one_out",
                "loss.ratio": "product",
                "loss.aggregation": "sequence",
                "kl.coef": 0.05,
                "kl.where": "reward",
                "kl.estimator": "k1",
            },
        ),
        (
            "reinforce_pp",
            {
                "advantage.estimator": "reward",
                "advantage.whiten": True,
                "kl.coef": 1e-3,
                "kl.where": "reward",
                "kl.estimator": "k1",
                "shaping.skip_equal_groups": False,
            },
        ),
        (
            "reinforce_pp_baseline",
            {"advantage.estimator": "group_mean", "advantage.whiten": True, "kl.coef": 1e-3, "kl.estimator": "k2"},
        ),
        ("gdpo", {"advantage.components": "normalise_then_sum"}),
        (
            "ppo",
            {
                "advantage.estimator": "gae",
                "advantage.lam": 0.95,
                "advantage.whiten": True,
                "critic": {"lr": None, "loss_coef": 1.0, "value_clip": 0.2},
                "shaping.skip_equal_groups": False,
            },
        ),
    ],
)  # fmt: skip
def test_a_name_is_a_published_setting_of_the_same_keys(name: str, keys: dict[str, Any]) -> None:
    expected = algorithms.GrpoOptions().model_dump() | {"name": name}
    for key, value in keys.items():
        group, _, leaf = key.partition(".")
        expected = expected | ({group: expected[group] | {leaf: value}} if leaf else {key: value})
    assert algorithms.ALGORITHMS[name]().model_dump() == expected


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS))
def test_every_setting_makes_sense(name: str) -> None:
    teacher = {"url": "http://127.0.0.1:8000"}
    missing = {"dr_grpo": {"loss": {"fixed_length": 64}}, "distillation": {"teacher": teacher}}.get(name, {})
    assert algorithms.ALGORITHMS[name].model_validate({"name": name, **missing}).invalid_settings() == []


def test_a_key_replaces_that_key_of_the_setting_alone() -> None:
    options = recipe("algorithm.name=gspo", "algorithm.loss.clip_high=0.001").algorithm
    assert (options.loss.clip_high, options.loss.clip_low, options.loss.ratio) == (0.001, 3e-4, "sequence")
    assert recipe("algorithm.name=rloo", "algorithm.kl.coef=0").algorithm.kl.where == "reward"


def test_another_name_drops_the_keys_of_the_earlier_algorithm(tmp_path: Path) -> None:
    assert recipe().algorithm.loss.anchor == "sampler"
    assert recipe("algorithm.name=gspo").algorithm == algorithms.GspoOptions()
    assert recipe("algorithm.kl.coef=0.1", "algorithm.name=gspo").algorithm.kl.coef == 0.1
    assert recipe("algorithm={name: gspo}").algorithm == algorithms.GspoOptions()
    assert recipe("algorithm={name: grpo}").algorithm.loss.anchor == "sampler"
    file = tmp_path / "mine.yaml"
    file.write_text("algorithm: {name: cispo, temperature: 0.7}\n")
    options = recipe(files=("grpo.yaml", str(file))).algorithm
    assert options == algorithms.CispoOptions(temperature=0.7)
    file.write_text("algorithm: {name: grpo, temperature: 0.7}\n")
    options = recipe(files=("grpo.yaml", str(file))).algorithm
    assert (options.loss.anchor, options.temperature) == ("sampler", 0.7)
    file.write_text("algorithm: {name: gspo, temperature: '${lr}'}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:1: algorithm.temperature: .*lr"):
        recipe(files=("grpo.yaml", str(file)))
    assert recipe("algorithm.name=cispo", files=("grpo.yaml", str(file))).algorithm == algorithms.CispoOptions()


OWN = '''
from typing import Literal

from {recipe}.algorithms import GrpoOptions
from {recipe}.objective import PolicyLoss


class Mine(GrpoOptions):
    """GRPO with wide bounds."""

    name: str
    loss: PolicyLoss = PolicyLoss(clip_high=0.5)
    sharpness: float = 2.0

    def create(self, setup):
        return ("made", setup, self.sharpness)


Other = 3
'''


def test_an_algorithm_of_the_users_own_is_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own_algorithm.py"
    file.write_text(OWN.format(recipe=algorithms.__name__.rpartition(".")[0]))
    options = recipe(f"algorithm.name={file}:Mine", "algorithm.sharpness=3").algorithm
    assert (options.loss.clip_high, options.sharpness, options.loss.anchor) == (0.5, 3.0, "trainer")
    assert options.create("setup") == ("made", "setup", 3.0)
    assert recipe(f"algorithm.name={file}:Mine").model_dump(mode="json")["algorithm"]["sharpness"] == 2.0
    broken = tmp_path / "broken.py"
    broken.write_text("class Mine(\n")
    for name, message in [
        (f"{broken}:Mine", "broken.py:1: '(' was never closed: class Mine("),
        (f"{file}:Other", "has no subclass of AlgorithmOptions called 'Other'"),
        (f"{tmp_path}/none.py:Mine", "cannot be imported"),
        ("no_such_module:Mine", "no_such_module cannot be imported: No module named 'no_such_module'"),
        ("gpso", "there is no algorithm 'gpso' (did you mean 'gspo'?)"),
    ]:
        with pytest.raises(ConfigError, match="command line: algorithm") as error:
            recipe(f"algorithm.name={name}")
        assert message in str(error.value)
