"""Physics + Task = VecEnv: control, simulate, measure, reward, reset."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from embodichain.envs.actions import RobotActionManager
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.observations import ObservationBuilder, Seen
from embodichain.envs.physics import Physics
from embodichain.envs.random import RandomStreams
from embodichain.envs.rendering import Cameras, Load, Quality
from embodichain.envs.resets import DomainRandomization, Drawn, LiveState, Restarts, check_state
from embodichain.envs.robots import Robot
from embodichain.envs.task import Scene, Task
from embodichain.envs.vec_env import Action, EnvIds, StepResult, VecEnv
from embodichain.envs.wrappers import ChunkTally, Moment
from embodichain.errors import ConfigError, nearest
from embodichain.utils.cuda_graphs import GraphedStep, StepParts

# MERGED scoring: What the state reached is worth: success, reward, the end of an episode, and measures for the log.


class Scoring:
    """Turns measurements of all envs into what a step returns about them."""

    def __init__(self, cfg: GymCfg, task: Task, num_envs: int, max_episode_steps: int) -> None:
        device = task.physics.device
        self._task = task
        self._sparse = cfg.env.rewards.mode == "sparse"
        self._ends_with_success = cfg.env.terminate_on_success
        self._weights = reward_weights(cfg, type(task))
        self._weight_row = torch.tensor(list(self._weights.values()), device=device)
        self._limit = torch.tensor(max_episode_steps, device=device)
        self._none = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._zeros = torch.zeros(num_envs, device=device)

    def score(self, scene: Scene, action: Tensor, step: Tensor, diverged: Tensor | None) -> Moment:
        """Judge the state after an action: envs ``diverged`` (``None``: none) end and have not succeeded."""
        success = self._task.success(scene)
        if diverged is not None:
            success = success & ~diverged
        scene["success"] = success.float()
        parts, reward = self._reward(scene, action)
        terminated = success if self._ends_with_success else self._none
        for ended in (self._task.failed(scene), diverged):
            if ended is not None:
                terminated = terminated | ended
        if terminated is success or terminated is self._none:  # whoever gets it may keep it; a task may reuse its own
            terminated = terminated.clone()
        return Moment(parts, reward, terminated, step >= self._limit, self._metrics(scene, diverged))

    def _reward(self, scene: Scene, action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the weighted parts and their sum."""
        if self._sparse:
            return {"success": scene["success"].clone()}, scene["success"].clone()
        if not self._weights:
            return {}, self._zeros.clone()
        terms = self._task.reward_terms(scene, action)
        parts = torch.stack([terms[name] for name in self._weights], dim=1) * self._weight_row
        return dict(zip(self._weights, parts.unbind(1), strict=True)), parts.sum(dim=1)

    def _metrics(self, scene: Scene, diverged: Tensor | None) -> dict[str, Tensor]:
        measures = {"success": scene["success"], "diverged": self._zeros if diverged is None else diverged.float()}
        measures.update(self._task.metrics(scene))
        if len({measure.dtype for measure in measures.values()}) > 1:  # each keeps its own type
            return {name: measure.clone() for name, measure in measures.items()}
        copies = torch.stack(list(measures.values()))
        return dict(zip(measures, copies.unbind(0), strict=True))


def reward_weights(cfg: GymCfg, task_class: type[Task]) -> dict[str, float]:
    """Return the weight of each reward term, those of the config over those of the task; 0 leaves a term out."""
    known = task_class.reward_weights
    unknown = [name for name in cfg.env.rewards.weights if name not in known]
    if unknown:
        raise ConfigError(
            [f"env.rewards.weights.{n}: no such reward term of {cfg.id}.{nearest(n, known)}" for n in unknown]
        )
    weights = {**known, **cfg.env.rewards.weights}
    return {name: weight for name, weight in weights.items() if weight != 0.0}


_DEFAULT_EPISODE = 100  # steps, where neither the config nor the task says how long an episode is


class TaskEnv(VecEnv):
    """``num_envs`` copies of a task on one physics backend."""

    def __init__(self, cfg: GymCfg, task_class: type[Task], physics: Physics) -> None:
        self.cfg, self.physics = cfg, physics
        self.num_envs, self.device = physics.num_envs, physics.device
        self.max_episode_steps = cfg.max_episode_steps or _DEFAULT_EPISODE
        self.robot = Robot(physics.model, cfg.robot, self.device)
        self.task = task_class(cfg, physics, self.robot)
        self.action_manager: RobotActionManager = RobotActionManager(
            cfg.env.actions, self.robot, self.num_envs, self.device
        )
        self.action_space = self.action_manager.space
        self._scoring = Scoring(cfg, self.task, self.num_envs, self.max_episode_steps)
        self.seed = secrets.randbits(61) if cfg.seed is None else cfg.seed
        self._streams = RandomStreams(self.num_envs, self.device, self.seed)
        self._step = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._all = torch.arange(self.num_envs, device=self.device)
        self._one = torch.ones((), dtype=torch.int64, device=self.device)
        self._cameras = Cameras(physics.model, cfg.env.observations.cameras)
        self._pictures = physics.open_cameras(cfg.env.observations.cameras)
        self._observations = ObservationBuilder(cfg.env.observations, self)
        domain = DomainRandomization(cfg.env.events, physics, task_class.object_body)
        self._live = LiveState(physics, self._streams, self._step, self.task.variables, domain)
        self._restarts = Restarts(self.task, self._live, self._seen_in)
        self._restarts.begin(self._all)
        self._scene: Scene | None = None
        self._seen = self._observations.build(self._look(), self._all)
        self._obs: TensorDict = self._observations.pack(self._seen)
        self.observation_space: gym.spaces.Dict = self._observations.space(self._obs)
        self._masked = self.device.type != "cpu"
        parts = StepParts(self._control, self._advance_physics, self._draw_next, self._conclude)
        recorded = self._masked and not self._cameras.cfgs
        self._advance: Callable[[Tensor], StepResult] = GraphedStep(parts, self._adopt) if recorded else parts

    # --- the contract ---------------------------------------------------------------------------------------------

    def reset(self, seed: int | Tensor | None = None, env_ids: EnvIds = None) -> tuple[TensorDict, dict[str, Any]]:
        ids = self.resolve_ids(env_ids)
        resolved = self.resolve_seed(seed, ids.numel())
        if isinstance(resolved, int):
            self._streams.seed(ids, resolved)
        episodes = resolved if isinstance(resolved, Tensor) else None
        self._restarts.begin(ids, episodes)
        self._refresh(ids)
        return self._obs, {"episode_seed": self._streams.episode_seed}

    def step(self, action: Action) -> StepResult:
        return self._advance(self.action_manager.unwrap(action, self._step))

    def step_chunk(self, actions: Tensor) -> StepResult:
        """Take actions ``[num_envs, chunk_size, action_dim]`` and observe once; see ``chunks.py``.

        An env that ends is observed there and then, and waits for the others to be restarted with it.
        """
        tally = ChunkTally(self.num_envs, actions.shape[1], self.device)
        for action in actions.unbind(1):
            applied = self.action_manager.unwrap(action, self._step)
            self._control(applied)
            self._advance_physics()
            ended = tally.add(self._measure(applied))
            self._observe(ended)
            if not bool(tally.active.any()):
                break
        self._observe(tally.active)
        final = self._obs
        self._restart(tally.terminated | tally.truncated)
        return tally.result(self._obs, final, self._streams.episode_seed)

    # --- a step, in parts: see ``graphed.py`` ---------------------------------------------------------------------

    def _control(self, applied: Tensor) -> None:
        """Write what the motors are to do."""
        self.physics.ctrl.copy_(self.action_manager.control(applied, self.physics.qpos[:, self.robot.qpos]))

    def _advance_physics(self) -> None:
        self.physics.step(self.cfg.env.substeps)

    def _draw_next(self) -> Drawn | None:
        """On a GPU: draw the starts that may be needed."""
        return self._restarts.draw() if self._masked else None

    def _conclude(self, applied: Tensor, drawn: Drawn | None) -> StepResult:
        """Measure, observe and restart what is done."""
        moment = self._measure(applied)
        self._show(self._observations.build(self._look(), self._all))
        final = self._obs
        self._restart(moment.terminated | moment.truncated, drawn)
        info = {
            "final_observation": final,
            "rewards": moment.parts,
            "metrics": moment.metrics,
            "episode_seed": self._streams.episode_seed,
        }
        return self._obs, moment.reward, moment.terminated, moment.truncated, info

    def _measure(self, applied: Tensor) -> Moment:
        """Look at the state reached and judge it; nothing is observed yet, and nothing restarted."""
        self.physics.settle()
        self._step.add_(self._one)
        self._scene = scene = self.task.read()
        return self._scoring.score(scene, applied, self._step, self.physics.diverged)

    def _restart(self, done: Tensor, drawn: Drawn | None = None) -> None:
        """Start the next episode where ``done`` ``[num_envs]`` holds: by index on the CPU, by mask on a GPU."""
        if not self._masked:
            ended = done.nonzero()
            if ended.numel():
                ids = ended.view(-1)
                self._show(self._seen.with_rows(self._restarts.at(ids), ids))
                self._scene = None
            return
        if self._cameras.cfgs and not bool(done.any()):
            return  # to find that out is faster than to draw all pictures again
        self._restarts.where(done, drawn or self._restarts.draw())
        self._scene = None
        self._show(self._observations.build(self._look(), self._all))

    def get_state(self) -> TensorDict:
        return TensorDict(self._live.read(), batch_size=[self.num_envs], device=self.device)

    def set_state(self, state: TensorDictBase, env_ids: EnvIds = None) -> TensorDict:
        ids = self.resolve_ids(env_ids)
        check_state(state, self.get_state(), ids.numel())
        self._live.write(ids, state.to(self.device))
        self._refresh(ids)
        return self._obs

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

    def pictures(self, env_ids: Tensor) -> dict[str, Tensor]:
        """Return what the configured cameras see, uint8 ``[len(env_ids), height, width, 3]`` each."""
        if self._pictures is not None:
            taken = self._pictures.take(self.task.markers())
            return taken if env_ids is self._all else {name: frames[env_ids] for name, frames in taken.items()}
        names = self._cameras.cfgs
        return {name: torch.from_numpy(self.render(env_ids, name, None, "lean")).to(self.device) for name in names}

    def prepare(self) -> None:
        if not self._masked:
            self._restarts.prepare()
            self._scene = None

    def close(self) -> None:
        self._cameras.close()
        self.physics.close()

    # --- the expert -----------------------------------------------------------------------------------------------

    def expert_action(self) -> Tensor:
        """Return the scripted expert's action ``[num_envs, action_dim]`` for the present state."""
        return self.task.expert_action(self._look(), self.action_manager)

    def create_demo_action_list(self) -> list[Tensor]:
        """Return the expert's actions from the present state until every env has ended once; the state is kept."""
        state, actions = self.get_state(), []
        running = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        while bool(running.any()):
            actions.append(self.expert_action())
            _, _, terminated, truncated, _ = self.step(actions[-1])
            running &= ~(terminated | truncated)
        self.set_state(state)
        return actions

    def noise(self, env_ids: Tensor, size: int) -> Tensor:
        """Return the standard normal noise ``[len(env_ids), size]`` that belongs to the envs' present steps."""
        return self._streams.noise(env_ids, self._step[env_ids], size)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _show(self, seen: Seen) -> None:
        """Make this what is observed from now on."""
        self._seen, self._obs = seen, self._observations.pack(seen)

    def _seen_in(self, env_ids: Tensor) -> Seen:
        return self._observations.build(self.task.read(env_ids), env_ids)

    def _adopt(self) -> Callable[[], None]:
        """Return what makes this env look at the measurements that a recorded step writes to."""
        scene, seen, obs = self._scene, self._seen, self._obs

        def restore() -> None:
            self._scene, self._seen, self._obs = scene, seen, obs

        return restore

    def _observe(self, mask: Tensor) -> None:
        """Observe the envs where ``mask`` ``[num_envs]`` holds as they are now; the others keep what they last saw."""
        ids = torch.nonzero(mask).reshape(-1)
        if ids.numel():
            scene = self._look()
            rows = scene if ids.numel() == self.num_envs else {name: value[ids] for name, value in scene.items()}
            self._show(self._seen.with_rows(self._observations.build(rows, ids), ids))

    def _look(self) -> Scene:
        """Return the measurements of the present state, which are taken once."""
        if self._scene is None:
            self._scene = self.task.read()
        return self._scene

    def _refresh(self, env_ids: Tensor) -> None:
        """Measure and observe these envs again, without touching what was returned before."""
        self._show(self._seen.with_rows(self._seen_in(env_ids), env_ids))
        self._scene = None

    def _loader(self) -> Load:
        """Return what puts one env's state, goal markers included, into an ``MjData``."""
        markers = {
            int(self.physics.model.body(name).mocapid[0]): positions.cpu().numpy()
            for name, positions in self.task.markers().items()
        }

        def load(data: mujoco.MjData, env: int) -> None:
            self.physics.load(data, env)
            for mocap, positions in markers.items():
                data.mocap_pos[mocap] = positions[env]

        return load
