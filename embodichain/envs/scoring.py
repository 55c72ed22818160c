"""What the state reached is worth: success, reward, the end of an episode, and measures for the log."""

from __future__ import annotations

import torch
from torch import Tensor

from embodichain.envs.chunks import Moment
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.task import Scene, Task
from embodichain.errors import ConfigError, nearest


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
