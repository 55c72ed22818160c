"""Gymnasium's MuJoCo suite on this package's batched physics, from the models inside the ``gymnasium`` package.

Observations, rewards, terminations and resets are those of Gymnasium's version 5, and so are the arguments of the
environments (``kwargs``), whose defaults are read from Gymnasium's signatures. As there, body positions lag by one
substep.
"""

import inspect
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import mujoco
import torch
from gymnasium.envs.mujoco.mujoco_env import expand_model_path
from gymnasium.envs.registration import load_env_creator
from torch import Tensor
from torch.linalg import vector_norm

from embodichain.envs.env_cfg import ActionsCfg, EnvCfg, EventsCfg, GymCfg, RobotCfg, mounted_cameras
from embodichain.envs.model_files import read_spec
from embodichain.envs.physics import Physics
from embodichain.envs.physics.contact_forces import ask_for_contact_forces
from embodichain.envs.random import RandomStreams
from embodichain.envs.randomization import prepare_spec
from embodichain.envs.rendering import camera_names, mount_cameras
from embodichain.envs.robots import Robot
from embodichain.envs.task import ResetState, Scene, Task
from embodichain.errors import ConfigError

_IGNORED = frozenset({"render_mode"})  # every environment can render
_ELSEWHERE = frozenset({"default_camera_config"})  # needs Gymnasium's own renderer
_TRIES = 32  # candidate positions; all are too close with probability 1e-13


@cache
def _defaults(id: str) -> dict[str, Any]:
    """Return the arguments of an environment and their defaults in Gymnasium."""
    entry = gym.spec(id).entry_point
    create = load_env_creator(entry) if isinstance(entry, str) else entry
    parameters = inspect.signature(create).parameters.values()  # type: ignore[arg-type]
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _check_arguments(id: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless arguments have the types of their defaults."""
    problems = []
    for name, value in kwargs.items():
        default = _defaults(id).get(name)
        if name in _IGNORED or default is None:
            continue
        if name == "main_body":
            wanted, fits = "the number or name of a body", isinstance(value, int | str)
        elif name == "frame_skip":
            wanted, fits = "a whole number of at least 1", _is_number(value) and int(value) == value >= 1
        elif isinstance(default, bool):
            wanted, fits = "true or false", isinstance(value, bool)
        elif isinstance(default, str):
            wanted, fits = "text", isinstance(value, str)
        elif isinstance(default, tuple):
            pair = isinstance(value, Sequence) and len(value) == 2 and all(_is_number(v) for v in value)
            wanted, fits = "two numbers, the lower one first", pair and value[0] <= value[1]
        else:
            wanted, fits = "a finite number", _is_number(value) and math.isfinite(value)
        if not fits:
            problems.append(f"kwargs.{name}: expected {wanted}, got {value!r:.80}")
    if problems:
        raise ConfigError(problems, id)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _body(model: mujoco.MjModel, name: int | str, argument: str) -> int:
    """Return the id of a body; ``ConfigError`` names the argument if there is none."""
    try:
        return int(model.body(name).id)
    except (KeyError, IndexError):
        raise ConfigError(f"kwargs.{argument}: the model has no body {name!r}") from None


class MujocoTask(Task):
    """An environment of the suite; all formulas use float64, as in Gymnasium."""

    id: ClassVar[str]
    """Its id in Gymnasium."""
    gaussian_velocity: ClassVar[bool] = False
    """Whether initial velocities are normal instead of uniform."""
    scene_file = ""  # set by kwargs.xml_file
    observes_afresh = True

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        if cfg.env.rewards.mode == "sparse":
            raise ConfigError(f"env.rewards.mode: {cfg.id} cannot be solved once and for all, so its reward is dense")
        named = [name for name in EventsCfg().__dataclass_fields__ if name != "terms"]
        events = {f"env.events.{name}": getattr(cfg.env.events, name) is not None for name in named}
        chosen = {**events, "env.actions": cfg.env.actions != ActionsCfg()}
        chosen["robot"] = cfg.robot != RobotCfg()
        if any(chosen.values()):
            raise ConfigError(
                [f"{key}: {cfg.id} has no such settings; leave it out" for key, given in chosen.items() if given]
            )
        super().__init__(cfg, physics, robot)
        self.settings = {**_defaults(self.id), **cfg.kwargs}
        model = physics.model
        self.dt = float(model.opt.timestep) * self.substeps
        self.camera = "track" if "track" in camera_names(model) else None

    @property
    def substeps(self) -> int:
        return int(self.cfg.kwargs.get("frame_skip", self.cfg.env.substeps))

    @classmethod
    def default_cfg(cls) -> GymCfg:
        """Return the config that matches Gymnasium's registry and signature."""
        skip = int(_defaults(cls.id)["frame_skip"])
        limit = gym.spec(cls.id).max_episode_steps
        return GymCfg(id=cls.id, max_episode_steps=limit, env=EnvCfg(substeps=skip, terminate_on_success=False))

    @classmethod
    def understands(cls, kwargs: Mapping[str, Any]) -> bool:
        return not kwargs.keys() - _IGNORED - (_defaults(cls.id).keys() - _ELSEWHERE)

    @classmethod
    def build_model(cls, cfg: GymCfg) -> mujoco.MjModel:
        _check_arguments(cls.id, cfg.kwargs)
        file = cfg.kwargs.get("xml_file", _defaults(cls.id)["xml_file"])
        try:
            path = Path(expand_model_path(file))
        except OSError as error:
            raise ConfigError(f"kwargs.xml_file: {error}") from error
        cameras = mounted_cameras(cfg)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated syntax in Gymnasium's files
            spec = read_spec(path)
            if "cfrc_ext" in cls.outputs and cfg.device == "cpu":
                ask_for_contact_forces(spec)
            prepare_spec(cfg.env.events, spec)
            model = mount_cameras(spec, cameras) if cameras else spec.compile()
        if cfg.env.timestep is not None:
            model.opt.timestep = cfg.env.timestep
        if cfg.device != "cpu" and model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON  # the same solution, and supported by MuJoCo Warp
        return model

    @classmethod
    def make_robot(cls, cfg: GymCfg, physics: Physics) -> Robot | None:
        return None

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        nq, nv = int(self.physics.model.nq), int(self.physics.model.nv)
        scale = float(self.settings["reset_noise_scale"])
        if not self.gaussian_velocity:
            qpos, qvel = streams.uniform(env_ids, nq + nv, -scale, scale).split([nq, nv], dim=1)
            return ResetState(self._home + qpos, qvel)
        qpos = self._home + streams.uniform(env_ids, nq, -scale, scale)
        return ResetState(qpos, scale * streams.normal(env_ids, nv))

    def read(self, env_ids: Tensor | None = None) -> Scene:
        physics = self.physics
        rows = {"qpos": physics.qpos, "qvel": physics.qvel, **physics.outputs}
        if physics.motion is not None:
            rows["motion"] = physics.motion
        return rows if env_ids is None else {name: value.index_select(0, env_ids) for name, value in rows.items()}

    def observe(self, scene: Scene) -> dict[str, Any]:
        return {"state": self.state_vector(scene).float()}

    @abstractmethod
    def state_vector(self, scene: Scene) -> Tensor:
        """Return the observation vector ``[n, size]``."""

    def success(self, scene: Scene) -> Tensor | None:
        return None

    def control_reward(self, weight: str) -> Tensor:
        """Return the negative control cost, the weighted sum of squared controls, ``[num_envs]``."""
        return vector_norm(self.physics.ctrl, dim=1).square() * -self.settings[weight]  # faster than a sum


def _motion(scene: Scene, hidden: int = 0) -> Tensor:
    """Return positions, without the first ``hidden`` of them, and velocities, ``[n, size]``."""
    if "motion" in scene:  # one copy is enough
        return scene["motion"][:, hidden:]
    return torch.cat((scene["qpos"][:, hidden:], scene["qvel"]), dim=1)


def _square_sum(values: Tensor) -> Tensor:
    return values.square().flatten(1).sum(dim=1)


def _once(measure: Callable[[Any, Scene], Tensor]) -> Callable[[Any, Scene], Tensor]:
    """Cache a measure in the scene, so that it is computed once."""
    name = measure.__name__

    @wraps(measure)
    def known(task: Any, scene: Scene) -> Tensor:
        if name not in scene:
            scene[name] = measure(task, scene)
        return scene[name]

    return known


class Locomotion(MujocoTask):
    """A body rewarded for its velocity along x, with a control cost."""

    reward_weights = {"reward_forward": 1.0, "reward_ctrl": 1.0}
    plane: ClassVar[int] = 1
    """Number of position coordinates that are not observed."""
    speed_limit: ClassVar[float | None] = None
    """Bound on observed velocities."""

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        super().__init__(cfg, physics, robot)
        self._before = torch.zeros(physics.num_envs, dtype=physics.qpos.dtype, device=physics.device)

    def x_position(self, scene: Scene) -> Tensor:
        """Return the coordinate ``[n]`` whose velocity is rewarded."""
        return scene["qpos"].select(1, 0).contiguous()

    def before_step(self) -> None:
        self._before.copy_(self.x_position(self.read()))

    @_once
    def velocity(self, scene: Scene) -> Tensor:
        """Return the mean velocity along x during the last step, ``[num_envs]``."""
        return (self.x_position(scene) - self._before) / self.dt

    def metrics(self, scene: Scene) -> dict[str, Tensor]:
        return {"x_position": scene["qpos"][:, 0], "x_velocity": self.velocity(scene)}

    def state_vector(self, scene: Scene) -> Tensor:
        hidden = self.plane if self.settings["exclude_current_positions_from_observation"] else 0
        if self.speed_limit is None:
            return _motion(scene, hidden)
        qvel = scene["qvel"].clamp(-self.speed_limit, self.speed_limit)
        return torch.cat((scene["qpos"][:, hidden:], qvel), dim=1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        forward = self.settings["forward_reward_weight"] * self.velocity(scene)
        return {"reward_forward": forward, "reward_ctrl": self.control_reward("ctrl_cost_weight")}


class HalfCheetah(Locomotion):
    """Run forward with two legs in a plane; an episode ends with its time."""

    id = "HalfCheetah-v5"
    gaussian_velocity = True


class Swimmer(Locomotion):
    """Swim forward with three links in a plane; an episode ends with its time."""

    id = "Swimmer-v5"
    plane = 2


class Walker(Locomotion):
    """A runner that is rewarded while it is healthy; an episode ends when it is not."""

    reward_weights = {"reward_forward": 1.0, "reward_ctrl": 1.0, "reward_survive": 1.0}
    height: ClassVar[int] = 1
    """The coordinate that ``healthy_z_range`` bounds."""

    def healthy(self, scene: Scene) -> Tensor:
        """Return where the body is healthy, bool ``[n]``."""
        return _within(scene["qpos"][:, self.height], self.settings["healthy_z_range"])

    @_once
    def is_healthy(self, scene: Scene) -> Tensor:
        """Return ``healthy``, cached."""
        return self.healthy(scene)

    def failed(self, scene: Scene) -> Tensor | None:
        return ~self.is_healthy(scene) if self.settings["terminate_when_unhealthy"] else None

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        survive = self.settings["healthy_reward"] * self.is_healthy(scene).to(scene["qpos"].dtype)
        return {**super().reward_terms(scene, action), "reward_survive": survive}


class Walker2d(Walker):
    """Walk forward on two legs in a plane."""

    id = "Walker2d-v5"
    speed_limit = 10.0

    def healthy(self, scene: Scene) -> Tensor:
        return super().healthy(scene) & _within(scene["qpos"][:, 2], self.settings["healthy_angle_range"])


class Hopper(Walker2d):
    """Hop forward on one leg in a plane."""

    id = "Hopper-v5"

    def healthy(self, scene: Scene) -> Tensor:
        return super().healthy(scene) & _within(_motion(scene, 2), self.settings["healthy_state_range"]).all(dim=1)


class Ant(Walker):
    """Walk forward on four legs; forces of contacts are observed, and cost a little."""

    id = "Ant-v5"
    gaussian_velocity = True
    plane = 2
    height = 2
    outputs = ("xpos", "cfrc_ext")
    reward_weights = {**Walker.reward_weights, "reward_contact": 1.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        super().__init__(cfg, physics, robot)
        self._main_body = _body(physics.model, self.settings["main_body"], "main_body")

    def x_position(self, scene: Scene) -> Tensor:
        return scene["xpos"][:, self._main_body, 0]

    def healthy(self, scene: Scene) -> Tensor:
        low, high = self.settings["healthy_z_range"]
        height = scene["qpos"][:, self.height]
        return (low <= height) & (height <= high)

    def state_vector(self, scene: Scene) -> Tensor:
        state = super().state_vector(scene)
        if not self.settings["include_cfrc_ext_in_observation"]:
            return state
        return torch.cat((state, self._forces(scene)[:, 1:].flatten(1)), dim=1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        contact = _square_sum(self._forces(scene)) * -self.settings["contact_cost_weight"]
        return {**super().reward_terms(scene, action), "reward_contact": contact}

    @_once
    def _forces(self, scene: Scene) -> Tensor:
        return scene["cfrc_ext"].clamp(*self.settings["contact_force_range"])


class Humanoid(Walker):
    """Walk forward on two legs in space; inertias, velocities and forces of all bodies are observed."""

    id = "Humanoid-v5"
    plane = 2
    height = 2
    outputs = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    reward_weights = {**Walker.reward_weights, "reward_contact": 1.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        super().__init__(cfg, physics, robot)
        mass = torch.tensor(physics.model.body_mass, dtype=physics.qpos.dtype, device=physics.device)
        self._share = mass / mass.sum()

    def x_position(self, scene: Scene) -> Tensor:
        return (scene["xipos"][..., 0] * self._share).sum(dim=1)  # bit-identical for any batch size

    def state_vector(self, scene: Scene) -> Tensor:
        return torch.cat((super().state_vector(scene), *_body_states(scene, self.settings)), dim=1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        contact = self.settings["contact_cost_weight"] * _square_sum(scene["cfrc_ext"])
        contact = contact.clamp(*self.settings["contact_cost_range"])
        return {**super().reward_terms(scene, action), "reward_contact": -contact}


class HumanoidStandup(MujocoTask):
    """Stand up from lying on the back; the reward is the height of the head over the length of a substep."""

    id = "HumanoidStandup-v5"
    outputs = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    reward_weights = {"reward_linup": 1.0, "reward_quadctrl": 1.0, "reward_impact": 1.0, "reward_survive": 1.0}

    def state_vector(self, scene: Scene) -> Tensor:
        hidden = 2 if self.settings["exclude_current_positions_from_observation"] else 0
        return torch.cat((scene["qpos"][:, hidden:], scene["qvel"], *_body_states(scene, self.settings)), dim=1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        height = scene["qpos"][:, 2]
        impact = self.settings["impact_cost_weight"] * _square_sum(scene["cfrc_ext"])
        return {
            "reward_linup": height / float(self.physics.model.opt.timestep),
            "reward_quadctrl": self.control_reward("ctrl_cost_weight"),
            "reward_impact": -impact.clamp(*self.settings["impact_cost_range"]),
            "reward_survive": torch.ones_like(height),
        }


class Reacher(MujocoTask):
    """Bring the tip of an arm of two links to a target in the plane."""

    id = "Reacher-v5"
    outputs = ("xpos",)
    reward_weights = {"reward_dist": 1.0, "reward_ctrl": 1.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        super().__init__(cfg, physics, robot)
        self._tip, self._target = (_body(physics.model, name, "xml_file") for name in ("fingertip", "target"))

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        model = self.physics.model
        qpos = self._home + streams.uniform(env_ids, int(model.nq), -0.1, 0.1)
        radius, angle = streams.uniform(env_ids, 2).unbind(1)
        radius, angle = 0.2 * radius.sqrt(), 2.0 * math.pi * angle  # uniform in a disc
        qpos[:, -2:] = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1)
        qvel = streams.uniform(env_ids, int(model.nv), -0.005, 0.005)
        qvel[:, -2:] = 0.0
        return ResetState(qpos, qvel)

    def state_vector(self, scene: Scene) -> Tensor:
        angles = scene["qpos"][:, :2].contiguous()  # for faster sines
        unchanged = _motion(scene, 2)[:, : int(self.physics.model.nq)]  # the target, and the velocities of the arm
        return torch.cat((angles.cos(), angles.sin(), unchanged, self._away(scene)[:, :2]), dim=1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {
            "reward_dist": -self.settings["reward_dist_weight"] * vector_norm(self._away(scene), dim=1),
            "reward_ctrl": self.control_reward("reward_control_weight"),
        }

    @_once
    def _away(self, scene: Scene) -> Tensor:
        return scene["xpos"].select(1, self._tip) - scene["xpos"].select(1, self._target)


class Pusher(MujocoTask):
    """Push a cylinder to a goal with an arm of seven joints."""

    id = "Pusher-v5"
    outputs = ("xpos",)
    reward_weights = {"reward_dist": 1.0, "reward_ctrl": 1.0, "reward_near": 1.0}

    def __init__(self, cfg: GymCfg, physics: Physics, robot: Robot | None) -> None:
        super().__init__(cfg, physics, robot)
        names = ("tips_arm", "object", "goal")
        self._bodies = [_body(physics.model, name, "xml_file") for name in names]

    def sample_start(self, env_ids: Tensor, streams: RandomStreams) -> ResetState:
        count = env_ids.numel()
        drawn = streams.uniform(env_ids, 2 * _TRIES).view(count, _TRIES, 2)
        places = torch.stack((-0.3 * drawn[..., 0], 0.4 * drawn[..., 1] - 0.2), dim=2)
        first = (places.norm(dim=2) > 0.17).to(torch.uint8).argmax(dim=1)  # the first one far from the goal
        qpos = self._home.repeat(count, 1)
        qpos[:, -4:-2] = places.gather(1, first.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        qpos[:, -2:] = 0.0
        qvel = streams.uniform(env_ids, int(self.physics.model.nv), -0.005, 0.005)
        qvel[:, -4:] = 0.0
        return ResetState(qpos, qvel)

    def state_vector(self, scene: Scene) -> Tensor:
        return torch.cat((scene["qpos"][:, :7], scene["qvel"][:, :7], *self._places(scene)), dim=1)

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        tip, object, goal = self._places(scene)
        return {
            "reward_dist": -self.settings["reward_dist_weight"] * vector_norm(object - goal, dim=1),
            "reward_ctrl": self.control_reward("reward_control_weight"),
            "reward_near": -self.settings["reward_near_weight"] * vector_norm(object - tip, dim=1),
        }

    def _places(self, scene: Scene) -> list[Tensor]:
        return [scene["xpos"].select(1, body) for body in self._bodies]


class InvertedPendulum(MujocoTask):
    """Balance a pole on a cart."""

    id = "InvertedPendulum-v5"
    reward_weights = {"reward_survive": 1.0}

    def state_vector(self, scene: Scene) -> Tensor:
        return _motion(scene)

    def failed(self, scene: Scene) -> Tensor | None:
        return ~self._upright(scene)  # NaN fails, too

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        return {"reward_survive": self._upright(scene).float()}

    @_once
    def _upright(self, scene: Scene) -> Tensor:
        return scene["qpos"].select(1, 1).abs() <= 0.2


class InvertedDoublePendulum(MujocoTask):
    """Balance a pole on a pole on a cart."""

    id = "InvertedDoublePendulum-v5"
    gaussian_velocity = True
    outputs = ("site_xpos", "qfrc_constraint")
    reward_weights = {"reward_survive": 1.0, "distance_penalty": 1.0, "velocity_penalty": 1.0}

    def state_vector(self, scene: Scene) -> Tensor:
        qpos, force = scene["qpos"], scene["qfrc_constraint"][:, :1]
        angles, qvel = qpos[:, 1:].contiguous(), scene["qvel"].clamp(-10.0, 10.0)  # for faster sines
        return torch.cat((qpos[:, :1], angles.sin(), angles.cos(), qvel, force.clamp(-10.0, 10.0)), dim=1)

    def failed(self, scene: Scene) -> Tensor | None:
        return scene["site_xpos"][:, 0, 2] <= 1.0

    def reward_terms(self, scene: Scene, action: Tensor) -> dict[str, Tensor]:
        x, _, z = scene["site_xpos"][:, 0].unbind(1)
        first, second = scene["qvel"][:, 1:3].unbind(1)
        return {
            "reward_survive": self.settings["healthy_reward"] * (z > 1.0).to(z.dtype),
            "distance_penalty": -(0.01 * x.square() + (z - 2.0).square()),
            "velocity_penalty": -(1e-3 * first.square() + 5e-3 * second.square()),
        }


def _within(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (bounds[0] < values) & (values < bounds[1])


def _body_states(scene: Scene, settings: Mapping[str, Any]) -> list[Tensor]:
    """Return the observed body quantities of a humanoid, as its arguments select them."""
    parts = {"cinert": 1, "cvel": 1, "qfrc_actuator": 6, "cfrc_ext": 1}  # skips the world body and the free joint
    chosen = [name for name in parts if settings[f"include_{name}_in_observation"]]
    return [scene[name][:, parts[name] :].flatten(1) for name in chosen]
