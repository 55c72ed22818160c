"""Physics + Task = VecEnv. ``TaskEnv.step`` reads from top to bottom: act, simulate, measure, score, observe, reset."""

import secrets
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs import demonstrations
from embodichain.envs.actions import MotorActionManager, RobotActionManager
from embodichain.envs.curricula import Curricula
from embodichain.envs.demonstrations import Demonstrations, DemonstrationStarts, Demonstrator
from embodichain.envs.env_cfg import GymCfg, ObservationsCfg
from embodichain.envs.observations import ObservationBuilder, PackedObservation, observation_space
from embodichain.envs.physics import VISUAL, Images, Load, Physics, Quality
from embodichain.envs.physics.mujoco_cpu import MujocoCpuPhysics
from embodichain.envs.random import RandomStreams, channel
from embodichain.envs.randomization import DomainRandomization, Draw, World, places
from embodichain.envs.resets import Drawn, EnvState, Resets, check_state
from embodichain.envs.scoring import Scoring
from embodichain.envs.task import Measurements, ResetState, Scene, Task
from embodichain.envs.task_contract import check_first_calls
from embodichain.envs.terms import LAST_ACTION, ObservationTerms
from embodichain.envs.vec_env import Action, EnvIds, StepOutcome, StepResult, VecEnv
from embodichain.errors import ConfigError
from embodichain.utils.cuda_graphs import GraphedStep, StepParts, copy_together

_SECTIONS = ("events", "observations")
"""Sections of ``env`` whose own code samples their ranges; the task samples those of all others."""
_DEFAULT_EPISODE = 100  # steps, if neither the config nor the task defines a limit


class TaskEnv(VecEnv):
    """``num_envs`` copies of a task on one physics backend."""

    max_episode_steps: int

    def __init__(self, cfg: GymCfg, task_class: type[Task], physics: Physics) -> None:
        self.cfg, self.physics = cfg, physics
        self.num_envs, self.device = physics.num_envs, physics.device
        self.max_episode_steps = cfg.max_episode_steps or _DEFAULT_EPISODE
        self.robot = task_class.make_robot(cfg, physics)
        self.task = task_class(cfg, physics, self.robot)
        self.has_expert = task_class.has_expert()
        self.action_manager: RobotActionManager | MotorActionManager
        if self.robot is None:
            self.action_manager = MotorActionManager(physics.model, self.num_envs, self.device)
        else:
            self.action_manager = RobotActionManager(cfg.env.actions, self.robot, self.num_envs, self.device)
        self._joints = slice(None) if self.robot is None else self.robot.qpos
        self.action_space = self.action_manager.space
        self._scoring = Scoring(cfg, self.task, self.num_envs, self.max_episode_steps)
        check_first_calls(self.task, self.num_envs, self.action_manager.action_dim, self._scoring.own_terms)
        self._terms = ObservationTerms(cfg.env.observations.terms, self.task)
        self._uses_last_action = self._terms.needs_last_action or self._scoring.terms.needs_last_action
        self.seed = secrets.randbits(61) if cfg.seed is None else cfg.seed
        self._streams = RandomStreams(self.num_envs, self.device, self.seed)
        self._step = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._all = torch.arange(self.num_envs, device=self.device)
        self._one = torch.ones((), dtype=torch.int64, device=self.device)
        self.on_step: Callable[[Tensor], None] | None = None
        """Called after every step with the reward ``[num_envs]``; it must not modify anything."""
        self._episode_end_callback: Callable[[Tensor], None] | None = None
        self._image_mask: Tensor | None = None
        """Bool ``[num_envs]``: envs that need images in the next observation; ``None`` means all."""
        self._observations = self._make_observations(task_class.observes_afresh)
        self._curricula = self._streams.curricula = Curricula(self.num_envs, self.device, cfg.env.curricula == "final")
        self._events = self._make_events(task_class.object_body)
        self._varied = [name for name in self._events.state() if name in VISUAL]
        """Fields of the model that change the visual appearance per env."""
        self._cameras = self.task.open_cameras(bool(self._varied))
        self._render_all = physics.open_cameras(cfg.env.observations.cameras)
        events = self._events.variables()
        self._state = EnvState(
            physics, self._streams, self._step, self.task.variables, self._events, self._curricula, events
        )
        kept = {LAST_ACTION: self.action_manager.action_dim} if self._uses_last_action else {}
        self._resets = Resets(self.task, self._state, lambda ids: self._build(self.task.read(ids), ids), kept)
        self._resets.begin(self._all)
        self._scene: Scene | None = None
        self._check_terms()
        self._packed: PackedObservation
        self._obs: TensorDict
        self._before: PackedObservation | None = None
        """On a GPU: a copy of the current observation at a fixed address, which a captured CUDA graph can read."""
        self._set_observation(self._build(self._measurements(), self._all))
        self._add_sensors()
        if cfg.env.events.demonstration_starts:
            self._add_demonstrations(cfg.env.events.demonstration_starts)
        self._curricula.check(self.task.success(self._measurements()) is not None)
        self.observation_space: gym.spaces.Dict = observation_space(self._obs, self._cameras.bounds())
        self._masked = self.device.type != "cpu"
        """Whether resets are computed for all envs and selected by a mask, which avoids synchronising with a GPU."""
        self._graphed: GraphedStep | None = None
        if self._masked and not self._renders_on_host:
            parts = StepParts(self._act, self._simulate, self._draw_resets, self._conclude)
            self._graphed, self._before = GraphedStep(parts, self._restore_captured), self._packed.copy()

    def _make_observations(self, observes_afresh: bool) -> ObservationBuilder:
        """Return the builder of observations; noise and sensor errors are functions of episode seed and step only."""
        errors = channel("observations", self.device)

        def noise(ids: Tensor, size: int) -> Tensor:
            return self._streams.noise(ids, self._step[ids], size)

        def draw(ids: Tensor) -> Draw:
            return Draw(self._streams, ids, errors, self._step[ids])

        builder = ObservationBuilder(self.cfg.env.observations, self.device, self._images, noise, draw)
        builder.is_fresh = observes_afresh
        return builder

    def _make_events(self, object_body: str | None) -> DomainRandomization:
        """Return the events of the config, and register all of its ranges with the curricula."""
        env, physics = self.cfg.env, self.physics
        seconds = float(physics.model.opt.timestep) * self.task.substeps
        world = World(physics, self.robot, seconds, self.action_manager.action_dim, "env.events", object_body)
        events = DomainRandomization(env.events, world, self._curricula)
        poses = env.events.replace(randomize_friction=None, randomize_mass=None, terms={})  # events
        self._curricula.add({f: getattr(env, f) for f in env.__dataclass_fields__ if f not in _SECTIONS}, "", "env")
        self._curricula.add(poses, "", "env.events")
        self._curricula.add(env.observations, "observations", "env.observations", used=True)
        self._observations.calibration = events.calibration
        return events

    def _check_terms(self) -> None:
        """Evaluate the task and the terms of the config on the first state, so that mistakes raise an error now."""
        solved = self.task.success(Measurements(self._measurements()))
        action = torch.zeros(self.num_envs, self.action_manager.action_dim, device=self.device)
        last = {LAST_ACTION: action} if self._uses_last_action else {}
        self._terms.check(Measurements({**self._measurements(), **last}))
        added = last if solved is None else {**last, "success": solved.float()}  # by a step, before it is scored
        scene = Measurements({**self._measurements(), **added})
        self.task.failed(Measurements(scene))
        self._scoring.terms.check(scene, action)

    def _add_sensors(self) -> None:
        """Add bias and delay to the observations, and reset again so that the first episode has them."""
        world = World(self.physics, self.robot, 0.0, self.action_manager.action_dim, "env.observations")
        sensors = self._observations.make_sensors(world, self._step, self._packed)
        if sensors is None:
            return
        self._events.add("observations", sensors)
        self._state.events.update(self._events.variables())
        self._restart_episodes()

    def _add_demonstrations(self, fraction: float) -> None:
        """Start this fraction of the episodes from states of the expert's demonstrations."""
        key, name = "env.events.demonstration_starts", self.cfg.id
        if not self.has_expert:
            raise ConfigError(f"{key}: {name} has no expert to demonstrate it; leave it out")
        if self._curricula.active:
            problem = (
                "demonstrations do not follow a curriculum, and their successes would count; leave one of them out"
            )
            raise ConfigError(f"{key}: {problem}")
        recorded = _record(self.cfg, type(self.task))
        if recorded is None:
            limit = f"{self._demonstration_steps} steps"
            problem = f"none of the expert's demonstrations of {name} succeeds within {limit}; leave it out"
            raise ConfigError(f"{key}: {problem}")
        if int(recorded.lengths.max()) == 1:
            raise ConfigError(
                f"{key}: {name} is solved from the start, so there is nothing to demonstrate; leave it out"
            )
        starts = DemonstrationStarts(recorded.to(self.device), fraction, self.max_episode_steps)
        self._resets.demonstrations = starts
        self._restart_episodes()

    def demonstrate(self) -> Demonstrations | None:
        """Return one demonstration of the expert in every env that succeeds; ``None`` if none does."""
        none = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

        def begin(seeds: Tensor) -> tuple[ResetState, Tensor]:
            self._scene = None
            start = self._resets.begin(self._all, seeds)
            solved = self.task.success(self._measurements())
            return start, none if solved is None else solved

        def step() -> tuple[Tensor, Tensor]:
            action = self.action_manager.unwrap(self.expert_action(), self._step)
            self._act(action)
            self._simulate()
            scene = self._measure()
            self._score(scene, action)  # as in every step: a task may store there what its success depends on
            solved = scene["success"] > 0 if "success" in scene else none
            parts = [part for part in (self.task.failed(scene), self.physics.diverged) if part is not None]
            return solved, torch.stack([none, *parts]).any(0)

        return Demonstrator(self.physics, self.task.variables, begin, step, self._demonstration_steps).record()

    @property
    def _demonstration_steps(self) -> int:
        return min(max(demonstrations.STEPS, self.max_episode_steps), demonstrations.LONGEST)

    def _restart_episodes(self) -> None:
        """Start the first episodes again, with the same seed."""
        self._streams.seed(self._all, self.seed)
        self._resets.begin(self._all)
        self._scene = None
        self._set_observation(self._build(self._measurements(), self._all))

    @property
    def name(self) -> str:
        return self.cfg.id

    @property
    def episode_steps(self) -> Tensor:
        """Steps taken in the current episode of each env, live, int64 ``[num_envs]``."""
        return self._step

    @property
    def segmentation_names(self) -> tuple[str, ...]:
        """The name of each id in ``segmentation/<camera>`` observations: the background, then all bodies."""
        return self._cameras.segmentation_names

    @property
    def _renders_on_host(self) -> bool:
        return bool(self._cameras.cfgs) and self._render_all is None

    def step(self, action: Action) -> StepResult:
        applied = self.action_manager.unwrap(action, self._step)
        if self._graphed is not None and self._episode_end_callback is None:  # on a GPU: CUDA graphs of the calls below
            result = self._graphed(applied)
        else:
            self._act(applied)
            self._simulate()
            result = self._conclude(applied, self._draw_resets())
        if self.on_step is not None:
            self.on_step(result[1])
        return result

    def _act(self, applied: Tensor) -> None:
        """Write the motor commands for an action."""
        self.task.before_step()
        self.task.take_action(applied)
        if self._events.active:
            self._events.before_step(self._step, self._streams)
            applied = self._events.act(applied, self._step, self._streams)
        self.physics.ctrl.copy_(self._control(applied))
        self._step.add_(self._one)  # not after the physics, which leaves no code in the processor's caches

    def _control(self, action: Tensor) -> Tensor:
        """Return the motor commands ``[num_envs, nu]`` for an action."""
        qpos, calibration = self.physics.qpos, self._events.calibration
        if self.robot is not None:
            qpos = qpos[:, self._joints]
        if calibration is None:
            return self.action_manager.control(action, qpos)
        return calibration.correct(self.action_manager.control(action, qpos + calibration.offset))

    def _simulate(self) -> None:
        self.physics.step(self.task.substeps)

    def _draw_resets(self) -> Drawn | None:
        """On a GPU: sample reset states for all envs ahead, independently of the action and the physics."""
        return self._resets.draw() if self._masked else None

    def _conclude(self, applied: Tensor, drawn: Drawn | None) -> StepResult:
        """Measure, score and observe the state reached, and reset the envs that are done."""
        before = self._packed if self._before is None else self._before
        scene = self._measure()
        diverged = self.physics.diverged
        outcome = self._score(scene, applied)
        packed = self._build(scene, self._all)
        if diverged is not None:  # keep the last observation
            packed = before.where(diverged & before.is_finite(), packed)
        self._packed, self._obs = packed, self._observations.unpack(packed)  # until the reset below
        final = self._obs
        done = outcome.terminated | outcome.truncated
        self._report_ends(done)
        obs = self._reset_done(done, drawn)
        info = {
            "final_observation": final,
            "rewards": outcome.rewards,
            "metrics": outcome.metrics,
            "episode_seed": self._streams.episode_seed,
        }
        return obs, outcome.reward, outcome.terminated, outcome.truncated, info

    def _measure(self) -> Scene:
        """Complete the physics step and return the measurements of the new state."""
        self.physics.settle()
        self._scene = scene = self.task.read()
        self.task.after_step(scene)
        return scene

    def _score(self, scene: Scene, applied: Tensor) -> StepOutcome:
        """Score the new state and store the action as the last one."""
        last = self.task.variables[LAST_ACTION] if self._uses_last_action else None
        if last is not None:
            scene[LAST_ACTION] = last
        outcome = self._scoring.score(scene, applied, self._step, self.physics.diverged)
        if last is not None:
            last.copy_(applied)
        if self._curricula.active:
            self._curricula.record(outcome.terminated | outcome.truncated, outcome.metrics.get("success"))
            outcome.metrics.update(self._curricula.metrics())
        return outcome

    def on_episode_end(self, callback: Callable[[Tensor], None] | None) -> bool:
        self._episode_end_callback = callback
        return True

    def _report_ends(self, done: Tensor) -> None:
        """Call the callback for episode ends, without envs that diverged: MuJoCo has reset those already."""
        if self._episode_end_callback is None:
            return
        diverged = self.physics.diverged
        ended = done if diverged is None else done & ~diverged
        if bool(ended.any()):
            self._episode_end_callback(ended)

    def _reset_done(self, done: Tensor, drawn: Drawn | None = None) -> TensorDict:
        """Start the next episode where ``done`` ``[num_envs]`` is set, and return the observation of all envs."""
        obs = self._begin_done(done, drawn)
        if self._curricula.active:  # afterwards, as these reset states may have been sampled during the last episode
            self._curricula.begin(done)
        return obs

    def _begin_done(self, done: Tensor, drawn: Drawn | None) -> TensorDict:
        """Reset and observe the done envs: by their indices on a CPU, by a mask on a GPU."""
        if not self._masked:
            rows = np.flatnonzero(done.numpy())  # faster than ``nonzero`` of a tensor
            if rows.size:
                ids = torch.from_numpy(rows)
                self._set_observation(self._packed.with_rows(self._resets.begin_drawn(ids), ids))
                self._scene = None
            return self._obs
        if self._renders_on_host and not bool(done.any()):
            return self._obs  # this check is faster than rendering all images again
        self._resets.begin_where(done, drawn or self._resets.draw())
        self._scene = None
        self._image_mask = None if self._observations.needs_every_step else done  # the other images are up to date
        packed = self._build(self._measurements(), self._all)
        self._image_mask = None
        return self._set_observation(packed.where(done, self._packed) if self._cameras.cfgs else packed)

    # The three parts of ``DefersResets``: a step in pieces, used for action chunks.

    def advance(self, action: Action) -> StepOutcome:
        applied = self.action_manager.unwrap(action, self._step)
        self._act(applied)
        self._simulate()
        scene = self._measure()
        outcome = self._score(scene, applied)
        if self._observations.needs_every_step:
            self._build(scene, self._all)
        self._report_ends(outcome.terminated | outcome.truncated)
        if self.on_step is not None:
            self.on_step(outcome.reward)
        return outcome

    def observe(self, mask: Tensor) -> TensorDict:
        diverged = self.physics.diverged
        if diverged is not None:  # keep the last observation
            mask = mask & ~(diverged & self._packed.is_finite())
        ids = torch.nonzero(mask).reshape(-1)
        if ids.numel():
            scene = self._measurements()
            rows = scene if ids.numel() == self.num_envs else {name: value[ids] for name, value in scene.items()}
            self._set_observation(self._packed.with_rows(self._build(rows, ids), ids))
        return self._obs

    def reset_done(self, done: Tensor) -> tuple[TensorDict, Tensor]:
        return self._reset_done(done), self._streams.episode_seed

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids)
        resolved = self.resolve_seed(seed, ids.numel())
        if isinstance(resolved, int):
            self._streams.seed(ids, resolved)
            self._curricula.clear(ids)
        self._resets.begin(ids, resolved if isinstance(resolved, Tensor) else None)
        if self._curricula.active:
            self._curricula.begin(torch.isin(self._all, ids))
        return self._refresh(ids), {"episode_seed": self._streams.episode_seed}

    def get_state(self) -> TensorDict:
        return TensorDict(self._state.read(), batch_size=[self.num_envs], device=self.device)

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        ids = self.resolve_ids(env_ids)
        check_state(state, self.get_state(), ids.numel())
        self._state.write(ids, state.to(self.device))
        return self._refresh(ids)

    def render(
        self,
        env_ids: EnvIds = None,
        camera: str | None = None,
        size: tuple[int, int] | None = (240, 320),
        quality: Quality = "high",
    ) -> np.ndarray:
        return self._cameras.render(
            self._loader(), self.resolve_ids(env_ids).tolist(), camera or self.task.camera, size, quality
        )

    def prepare(self) -> None:
        if not self._masked:
            self._resets.draw_ahead()
            self._scene = None

    def close(self) -> None:
        self._cameras.close()
        self.physics.close()

    def expert_action(self) -> Tensor:
        actions: Any = self.action_manager  # a RobotActionManager, if there is an expert
        actions.segment = None
        return self.task.expert_action(self._measurements(), actions)

    def expert_segment(self) -> Tensor:
        """Return the segment of the last expert action, int64 indices into ``SEGMENTS`` ``[num_envs]``."""
        actions: Any = self.action_manager
        marked: Tensor | None = actions.segment
        return torch.zeros(self.num_envs, dtype=torch.int64, device=self.device) if marked is None else marked

    def create_demo_action_list(self) -> list[Tensor]:
        """Return the expert's actions from the current state until every env has been done once; the state is kept."""
        state, actions = self.get_state(), []
        running = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        while bool(running.any()):
            actions.append(self.expert_action())
            _, _, terminated, truncated, _ = self.step(actions[-1])
            running &= ~(terminated | truncated)
        self.set_state(state)
        return actions

    def _measurements(self) -> Scene:
        """Return the measurements of the current state, cached until it changes."""
        if self._scene is None:
            self._scene = self.task.read()
        return self._scene

    def _build(self, scene: Scene, env_ids: Tensor) -> PackedObservation:
        if self._uses_last_action:
            last = self.task.variables[LAST_ACTION]
            scene[LAST_ACTION] = last if env_ids is self._all else last[env_ids]
        return self._observations.build(self._terms.add_to(self.task.observe(scene), scene), env_ids)

    def _set_observation(self, packed: PackedObservation) -> TensorDict:
        """Set the current observation and return it."""
        self._packed, self._obs = packed, self._observations.unpack(packed)
        if self._before is not None:
            copy_together([self._before.vectors, *self._before.others], [packed.vectors, *packed.others])
        return self._obs

    def _refresh(self, env_ids: Tensor) -> TensorDict:
        """Measure and observe these envs again, without modifying observations returned before."""
        self._scene = None
        return self._set_observation(self._packed.with_rows(self._build(self.task.read(env_ids), env_ids), env_ids))

    def _restore_captured(self) -> Callable[[], None]:
        """Return a function that restores the results of the captured step, to be called after every replay."""
        scene, packed, obs = self._scene, self._packed, self._obs

        def restore() -> None:
            self._scene, self._packed, self._obs = scene, packed, obs

        return restore

    def _images(self, env_ids: Tensor) -> Images:
        """Return the images of the configured cameras for these envs."""
        if self._render_all is None:
            images = self._cameras.observe(self._loader(), env_ids.tolist())
            return {group: {name: x.to(self.device) for name, x in some.items()} for group, some in images.items()}
        images = self._render_all(self.task.markers(), self._image_mask)
        if env_ids is self._all:
            return images
        return {group: {name: x[env_ids] for name, x in some.items()} for group, some in images.items()}

    def _loader(self) -> Load:
        """Return a function that copies one env's state, including goal markers, into an ``MjData``."""
        markers = {
            int(self.physics.model.body(name).mocapid[0]): positions.cpu().numpy()
            for name, positions in self.task.markers().items()
        }

        looks = {name: self.physics.model_field(name) for name in self._varied}

        def load(data: mujoco.MjData, env: int) -> None:
            self.physics.load(data, env)
            for name, rows in looks.items():  # the renderer's own model
                getattr(data.model, name)[:] = rows[env].cpu().numpy()
            for mocap, positions in markers.items():
                data.mocap_pos[mocap] = positions[env]

        return load


def _record(cfg: GymCfg, task_class: type[Task]) -> Demonstrations | None:
    """Record demonstrations on the CPU, which gives the same states everywhere, with the nominal physics."""
    terms = {name: term for name, term in cfg.env.events.terms.items() if term is not None and places(term)}
    events = cfg.env.events.replace(
        demonstration_starts=None, randomize_friction=None, randomize_mass=None, terms=terms
    )
    env_cfg = cfg.env.replace(events=events, observations=ObservationsCfg())
    cfg = cfg.replace(num_envs=demonstrations.EPISODES, device="cpu", env=env_cfg)
    physics = MujocoCpuPhysics(task_class.build_model(cfg), cfg.num_envs, cfg.num_threads, task_class.outputs)
    env = TaskEnv(cfg, task_class, physics)
    try:
        return env.demonstrate()
    finally:
        env.close()
