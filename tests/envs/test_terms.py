"""Reward and observation terms by name: their values, their use in a config, and what is wrong with a config."""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch

from embodichain.envs import registration, terms
from embodichain.envs.registration import load_gym_config, make, register_task
from embodichain.envs.task import UnknownQuantityError
from embodichain.envs.tasks.reach import Reach
from embodichain.errors import ConfigError

SCENE = {
    "ee_pos": torch.tensor([[0.0, 0.0, 0.3], [0.5, 0.0, 0.1]]),
    "cube_pos": torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.0, 0.1]]),
    "cube_quat": torch.tensor([[1.0, 0.0, 0.0, 0.0], [math.cos(math.pi / 8), 0.0, 0.0, math.sin(math.pi / 8)]]),
    "goal": torch.tensor([[0.3, 0.0], [0.5, 0.2]]),
    "gripper": torch.tensor([0.08, 0.05]),
}
ACTION = torch.tensor([[0.5, -0.5], [1.0, 0.0]])


def reward(func, scene=SCENE, **params):
    return terms.REWARDS.bind(func, params, "env.rewards.terms.x")(None, scene, ACTION)


def test_values_of_the_library_are_those_computed_by_hand():
    close = torch.testing.assert_close
    close(reward("distance", of="ee", to="cube"), torch.tensor([0.5, 0.0]))
    close(reward("distance", of="cube", to="goal"), torch.tensor([0.4, 0.2]))  # a goal without height
    close(reward("distance", of="cube", to=[0.3, 0.0, 0.0]), torch.tensor([0.5, math.sqrt(0.05)]))
    close(reward("near", of="ee", to="cube", within=0.5), torch.tensor([1.0 - math.tanh(1.0), 1.0]))
    close(reward("closeness", of="ee", to="cube", start=0.6, end=0.1), torch.tensor([0.2, 1.0]))
    close(reward("lifted", of="cube", height=0.4, rest=0.1), torch.tensor([0.5, 0.0]))
    close(reward("effort"), torch.tensor([0.25, 0.5]))
    close(reward("action_rate", {**SCENE, "last_action": torch.zeros(2, 2)}), torch.tensor([0.25, 0.5]))
    turned = {**SCENE, "bin_quat": SCENE["cube_quat"].flip(0)}  # 45 degrees to either side
    close(reward("aligned", turned, of="cube", to="bin"), torch.full((2,), 0.5 + 0.5 * math.cos(math.pi / 4)))
    close(reward("aligned", turned, of="cube", to="bin", symmetry=4), torch.zeros(2), atol=1e-6, rtol=0.0)
    close(reward("grasped", of="cube", width=0.05), torch.tensor([0.0, 1.0]))
    lying = torch.tensor([[math.cos(math.pi / 4), math.sin(math.pi / 4), 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    close(reward("upright", {"cube_quat": lying}, of="cube"), torch.tensor([0.0, 1.0]), atol=1e-6, rtol=0.0)


def test_stages_pay_in_order_and_never_less_on_the_way():
    stages = [
        {"func": "closeness", "params": {"of": "ee", "to": "cube", "start": 1.0}, "done": 0.9},
        {"func": "lifted", "params": {"of": "cube", "height": 0.2}},
    ]
    gaps = torch.tensor([1.0, 0.5, 0.05, 0.05, 0.05, 0.5])
    heights = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.2, 0.2])
    cube = torch.stack((torch.zeros(6), torch.zeros(6), heights), dim=1)
    scene = {"cube_pos": cube, "ee_pos": cube + torch.stack((gaps, torch.zeros(6), torch.zeros(6)), dim=1)}
    staged = terms.REWARDS.bind("staged", {"stages": stages}, "x")
    value = staged(None, scene, torch.zeros(6, 1))
    # The last row: what is lifted without being reached pays nothing.
    torch.testing.assert_close(value, torch.tensor([0.0, 0.5 / 0.9, 1.0, 1.5, 2.0, 0.5 / 0.9]) / 2.0)


def test_a_config_adds_terms_to_a_task_of_the_package_and_takes_some_away():
    cfg = {
        "id": "PushCubeRL",
        "num_envs": 3,
        "seed": 1,
        "env": {
            "rewards": {
                "terms": {
                    "approach": {"func": "near", "weight": 2.0, "params": {"of": "ee", "to": "cube"}},
                    "smooth": {"func": "action_rate", "weight": -0.1},
                    "reach": None,
                },
                "weights": {"approach": 3.0},
            },
            "observations": {
                "terms": {
                    "object/height": {"func": "measured", "params": {"name": "distance"}},
                    "previous": {"func": "last_action"},
                    "object/quat": None,
                }
            },
        },
    }
    with make(cfg) as env:
        obs, _ = env.reset()
        assert obs["previous"].tolist() == torch.zeros(3, 6).tolist()
        assert set(obs["object"].keys()) == {"pos", "linvel", "offset", "height"}
        assert obs["object", "height"].shape == (3, 1)
        first, second = torch.full((3, 6), 0.5), torch.full((3, 6), -0.5)
        obs, _, _, _, info = env.step(first)
        assert set(info["rewards"]) == {"place", "effort", "success", "approach", "smooth"}
        torch.testing.assert_close(info["rewards"]["smooth"], torch.full((3,), -0.025))
        gap = (obs["object", "pos"] - obs["robot", "ee_pos"]).norm(dim=1)
        torch.testing.assert_close(info["rewards"]["approach"], 3.0 * (1.0 - torch.tanh(gap / 0.1)))
        state = env.get_state()
        _, _, _, _, info = env.step(second)
        torch.testing.assert_close(info["rewards"]["smooth"], torch.full((3,), -0.1))
        env.reset()
        obs = env.set_state(state)  # the action before is part of the state
        assert obs["previous"].tolist() == first.tolist()
        _, _, _, _, again = env.step(second)
        assert again["rewards"]["smooth"].tolist() == info["rewards"]["smooth"].tolist()


@pytest.mark.parametrize(
    ("term", "messages"),
    [
        (
            {"func": "distanse"},
            ["env.rewards.terms.x.func: unknown reward function 'distanse'. Did you mean 'distance'"],
        ),
        (
            {"func": "near", "params": {"off": "ee", "within": "far"}},
            [
                "env.rewards.terms.x.params.of: expected a value",
                "x.params.to: expected a value",
                "x.params.off: unknown key, got 'ee' (str). Did you mean 'of'",
                "x.params.within: expected a number, got 'far' (str)",
            ],
        ),
        (
            {"func": "near", "params": {"of": "ee", "to": "cub"}},
            ["env.rewards.terms.x.params.to: the task measures no position of 'cub'. Did you mean 'cube'? Valid: "],
        ),
        (
            {"func": "upright", "params": {"of": "ee"}},
            ["x.params.of: the task measures no orientation of 'ee'. Valid: cube."],
        ),
        (
            {"func": "staged", "params": {"stages": [{"func": "near", "params": {"of": "cub", "to": "ee"}}]}},
            ["env.rewards.terms.x.params.stages.0.params.of: the task measures no position of 'cub'"],
        ),
        ({"func": "staged", "params": {"stages": [{"func": "nearr"}]}}, ["x.params.stages.0.func: unknown", "'near'"]),
        ({"func": "staged", "params": {"stages": []}}, ["x.params.stages: expected at least one"]),
    ],
)
def test_a_wrong_term_is_one_error_with_its_path(term, messages):
    with pytest.raises(ConfigError) as caught:  # when it is made, not in the first step
        make({"id": "PushCubeRL", "env": {"rewards": {"terms": {"x": term}}}})
    for message in messages:
        assert message in str(caught.value)


def test_unknown_quantities_of_all_observation_terms_are_one_error():
    given = {
        "gap": {"func": "offset", "params": {"of": "ee", "to": "gaol"}},
        "q": {"func": "measured", "params": {"name": "qpo"}},
    }
    with pytest.raises(ConfigError) as caught:
        make({"id": "PushCubeRL", "env": {"observations": {"terms": given}}})
    assert "env.observations.terms.gap.params.to: the task measures no position of 'gaol'. Did you mean 'goal'" in str(
        caught.value
    )
    assert "env.observations.terms.q.params.name: the task measures no 'qpo'. Did you mean 'qpos'" in str(caught.value)


def test_own_functions_that_read_an_unknown_quantity_get_the_names_of_all():
    """A reward may read what exists after the first step only, so its error comes then."""
    terms.register_reward("test_misspelt")(lambda task, scene, action: scene["ee_poss"][:, 2])
    terms.register_observation("test_misspelt")(lambda task, scene: scene["ee_poss"])
    message = r"scene\['ee_poss'\]: nothing of that name is measured\. Did you mean 'ee_pos'\? Valid: .*to_goal"
    with pytest.raises(UnknownQuantityError, match=message):
        make({"id": "ReachRL", "env": {"observations": {"terms": {"own": {"func": "test_misspelt"}}}}})
    with (
        make({"id": "ReachRL", "env": {"rewards": {"terms": {"own": {"func": "test_misspelt"}}}}}) as env,
        pytest.raises(UnknownQuantityError, match=message),
    ):
        env.step(env.expert_action())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"factor": "x"}, r"params\.factor: expected .*number.*got 'x'"),
        ({"name": 1}, r"params\.name: expected a string, got 1"),
        ({"negative": "no"}, r"params\.negative: expected a boolean, got 'no'"),
    ],
)
def test_parameters_without_annotations_have_the_types_of_their_defaults(params, message):
    @terms.register_reward("test_plain")
    def plain(task, scene, action, factor=1, name="a", negative=False, more=None):
        return factor * ACTION[:, 0]

    assert reward("test_plain", factor=0.5, name="b", negative=True, more=[1]).tolist() == [0.25, 0.5]
    with pytest.raises(ConfigError, match=message):
        terms.REWARDS.bind("test_plain", params, "env.rewards.terms.x")


def test_what_a_term_keeps_in_the_scene_is_there_for_others(monkeypatch):
    """Also in its first call after a step, if it could not be checked before."""

    @terms.register_reward("test_keeps")
    def keeps(task, scene, action):
        scene["kept"] = scene["success"] * 0.0 + scene["after_a_step"]
        return scene["kept"]

    @terms.register_reward("test_reads")
    def reads(task, scene, action):
        return scene["kept"] + 1.0

    class Later(Reach):
        def after_step(self, scene):
            super().after_step(scene)
            scene["after_a_step"] = scene["distance"]

    monkeypatch.setattr(registration, "_TASKS", dict(registration._TASKS))
    register_task("LaterTest", Later)
    own = {"a": {"func": "test_keeps"}, "b": {"func": "test_reads"}}
    with make({"id": "LaterTest", "num_envs": 2, "env": {"rewards": {"terms": own}}}) as env:
        for _ in range(2):
            parts = env.step(env.expert_action())[4]["rewards"]
            torch.testing.assert_close(parts["b"], parts["a"] + 1.0)


@pytest.mark.parametrize("group", ["image", "depth", "segmentation"])
def test_groups_of_images_take_no_vectors(group):
    own = {f"{group}/x": {"func": "position", "params": {"of": "ee"}}}
    message = (
        rf"env\.observations\.terms\.{group}/x: '{group}' is the group of images .* returns \[1, 3\]; choose another"
    )
    with pytest.raises(ConfigError, match=message):
        make({"id": "ReachRL", "env": {"observations": {"terms": own}}})


def test_ones_own_functions_are_registered_by_name():
    @terms.register_reward("test_low")
    def low(task, scene, action, of: str, limit: float = 0.1):
        return (terms.position(scene, of)[:, 2] < limit).float()

    @terms.register_reward("test_matrix")
    def matrix(task, scene, action):
        return action

    rewards = {"mode": "dense", "terms": {"low": {"func": "test_low", "params": {"of": "cube"}}}}
    with make({"id": "PushCubeRL", "env": {"rewards": rewards}}) as env:
        assert env.step(torch.zeros(1, 6))[4]["rewards"]["low"].tolist() == [1.0]
    with pytest.raises(
        ConfigError, match=r"env.rewards.terms.bad: expected a function that returns one number per env"
    ):
        make({"id": "PushCubeRL", "env": {"rewards": {"terms": {"bad": {"func": "test_matrix"}}}}})
    with pytest.raises(TypeError, match="expected the arguments"):
        terms.register_reward("test_wrong")(lambda scene: scene)
    with pytest.raises(ConfigError, match="nothing to leave out"):
        make({"id": "PushCubeRL", "env": {"observations": {"terms": {"object/colour": None}}}})


def test_the_form_with_func_and_mode_is_understood_for_registered_names():
    cfg = load_gym_config(
        {
            "id": "PushCubeRL",
            "env": {
                "rewards": {
                    "approach": {"func": "near", "mode": "add", "weight": 0.5, "params": {"of": "ee", "to": "cube"}}
                },
                "observations": {
                    "gap": {"func": "offset", "mode": "add", "name": "object/gap", "params": {"of": "ee", "to": "cube"}}
                },
            },
        }
    )
    assert cfg.env.rewards.terms["approach"].weight == 0.5
    assert cfg.env.observations.terms["object/gap"].func == "offset"
    with pytest.raises(ConfigError) as caught:
        load_gym_config(
            {
                "id": "PushCubeRL",
                "env": {
                    "rewards": {
                        "approach": {"func": "approach_target", "params": {}},
                        "other": {"func": "near", "mode": "replace", "params": {}},
                    }
                },
            }
        )
    assert "env.rewards.approach (func 'approach_target': no such function here." in str(caught.value)
    assert "env.rewards.other.mode: expected 'add', got 'replace'" in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"approach.func: unknown reward function 'neer'. Did you mean 'near'"
    ) as caught:
        make({"id": "PushCubeRL", "env": {"rewards": {"approach": {"func": "neer", "params": {}}}}})
    assert "another simulator" not in str(caught.value)


@pytest.mark.parametrize("kind", ["reward", "observation"])
def test_the_guide_has_a_row_for_every_term_with_its_parameters(kind):
    registry = {"reward": terms.REWARDS, "observation": terms.OBSERVATIONS}[kind]
    text = (Path(__file__).parents[2] / "docs" / "own_task.md").read_text()
    rows = text.partition(f"| {kind} | parameters | value |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = {}
    for row in rows:
        name, parameters = re.findall(r"`(\w+)`", row.split("|")[1])[0], row.split("|")[2]
        shown[name] = {key: value or None for key, value in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", parameters)}
    expected = {}
    for name in registry:
        if not registry[name].__module__.startswith("embodichain"):
            continue  # registered by another test
        given = inspect.signature(registry[name]).parameters.values()
        expected[name] = {
            one.name: None if one.default is one.empty else str(one.default)
            for one in given
            if one.name not in registry.given
        }
    assert shown == expected
