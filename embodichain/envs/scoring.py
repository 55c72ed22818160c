"""Computes success, reward, termination and metrics of all envs from the measurements of a step."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from embodichain.envs.demonstrations import HEAD_START
from embodichain.envs.env_cfg import GymCfg
from embodichain.envs.task import Scene, Task
from embodichain.envs.terms import RewardTerms
from embodichain.envs.vec_env import StepOutcome
from embodichain.errors import ConfigError, nearest

_FEW = 4  # reward terms up to which a chain of additions is faster than a sum, with the same bits


class Scoring:
    """Scores the states that steps reach, by the reward terms of a task and of its config."""

    def __init__(self, cfg: GymCfg, task: Task, num_envs: int, max_episode_steps: int) -> None:
        device = task.physics.device
        self._task = task
        self.terms = RewardTerms(cfg.env.rewards.terms, task)
        """Reward terms of the config, in addition to the task's own."""
        self._sparse = cfg.env.rewards.mode == "sparse"
        self._ends_with_success = cfg.env.terminate_on_success
        self._weights = _reward_weights(cfg, task, self.terms)
        sparse_or_replaced = self._weights if self._sparse else self.terms.weights
        self.own_terms = [name for name in self._weights if name not in sparse_or_replaced]
        """Terms that the task itself has to return."""
        self._weight_column = torch.tensor(list(self._weights.values()), device=device).unsqueeze(1)
        self._weighs = any(weight != 1.0 for weight in self._weights.values())
        self._limit = torch.tensor(max_episode_steps, device=device)
        self._none = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._zeros = torch.zeros(num_envs, device=device)
        self._last_terms = torch.zeros(1 if self._sparse else len(self._weights), num_envs, device=device)

    def score(self, scene: Scene, action: Tensor, step: Tensor, diverged: Tensor | None) -> StepOutcome:
        """Score the state after an action; ``diverged`` envs (``None``: none) are truncated and never successful.

        MuJoCo resets a diverged env to the initial state of its model, so its measurements mean nothing. The reward of
        the previous step is repeated instead. As the observation is repeated, too, divergence is neither rewarded nor
        penalised, whatever the sign of the rewards.
        """
        success, valid = self._task.success(scene), None if diverged is None else ~diverged
        if success is not None:
            if valid is not None:
                success = success & valid
            scene["success"] = success.float()
        elif self._sparse:
            raise ConfigError("env.rewards.mode: this task cannot be solved, so its reward cannot be sparse; use dense")
        terms = self._weighted_terms(scene, action, diverged, step)
        terminated = success if success is not None and self._ends_with_success else self._none
        failed = self._task.failed(scene)
        if failed is not None:
            terminated = terminated | (failed if valid is None else failed & valid)
        if terminated is success or terminated is self._none:  # both may be reused by their owner
            terminated = terminated.clone()
        skipped = self._task.variables.get(HEAD_START)
        truncated = (step if skipped is None else step + skipped) >= self._limit
        if diverged is not None:
            truncated = truncated | diverged
        rewards, reward, metrics = self._in_single_precision(terms, scene, diverged)
        return StepOutcome(rewards, reward, terminated, truncated, metrics)

    def _weighted_terms(self, scene: Scene, action: Tensor, kept: Tensor | None, step: Tensor) -> list[Tensor]:
        """Return the weighted reward terms, ``[num_envs]`` each; where ``kept`` is set, those of the last step."""
        if self._sparse:
            terms = [scene["success"]]
        else:
            named = {**self._task.reward_terms(scene, action), **self.terms(scene, action)}
            terms = [named[name] for name in self._weights]
        weighs = self._weighs and not self._sparse
        if not terms or not (weighs or kept is not None or _any_integer(terms)):
            return terms
        rows = torch.stack(terms)
        if weighs or not rows.is_floating_point():
            rows = rows * self._weight_column
        if kept is not None:  # zero in the first step of an episode
            last = torch.where(step > 1, self._last_terms, 0.0)  # not a product: they may be infinite
            rows = torch.where(kept, last.to(rows.dtype), rows)
        return list(rows.unbind(0))

    def _in_single_precision(
        self, terms: list[Tensor], scene: Scene, diverged: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Return copies of the reward terms by name, of their sum and of the metrics; a task may compute in double."""
        reward = _total(terms) if terms else self._zeros
        if self._zeros.dtype != reward.dtype:
            self._zeros = self._zeros.to(reward.dtype)
        measures = {"success": scene["success"]} if "success" in scene else {}
        measures["diverged"] = self._zeros if diverged is None else diverged.to(reward.dtype)
        measures.update(self._task.metrics(scene))
        apart = _any_integer(measures.values())  # each keeps its dtype
        rows = torch.stack([*terms, reward] if apart else [*terms, reward, *measures.values()])  # copied at once
        if rows.dtype != torch.float32:
            rows = rows.float()
        count = len(terms)
        if rows.device.type == "cpu":
            self._last_terms = rows[:count]
        elif terms:  # at the address that a captured graph reads
            self._last_terms.copy_(rows[:count])
        copies = rows.unbind(0)
        metrics = [_copy_of(measure) for measure in measures.values()] if apart else copies[count + 1 :]
        names = ["success"] if self._sparse else self._weights
        return dict(zip(names, copies, strict=False)), copies[count], dict(zip(measures, metrics, strict=True))


def _any_integer(values: Iterable[Tensor]) -> bool:
    return not all(value.is_floating_point() for value in values)


def _copy_of(measure: Tensor) -> Tensor:
    return measure.to(torch.float32, copy=True) if measure.is_floating_point() else measure.clone()


def _total(terms: list[Tensor]) -> Tensor:
    """Return the sum of terms ``[num_envs]``, added in an order that does not depend on ``num_envs``."""
    return functools.reduce(torch.add, terms) if len(terms) <= _FEW else torch.stack(terms, dim=1).sum(dim=1)


def _reward_weights(cfg: GymCfg, task: Task, terms: RewardTerms) -> dict[str, float]:
    """Return the weight of each reward term; the config overrides the task, and a weight of 0 removes a term."""
    known = {**task.reward_weights, **terms.weights}
    unknown = [name for name in cfg.env.rewards.weights if name not in known]
    if unknown:
        raise ConfigError(
            [f"env.rewards.weights.{n}: no such reward term of {cfg.id}.{nearest(n, known)}" for n in unknown]
        )
    missing = [name for name in terms.removed if name not in known]
    if missing:
        problems = [f"env.rewards.terms.{n}: {cfg.id} has no such term to leave out" for n in missing]
        raise ConfigError([f"{problem}.{nearest(n, known)}" for problem, n in zip(problems, missing, strict=True)])
    weights = {**known, **cfg.env.rewards.weights, **dict.fromkeys(terms.removed, 0.0)}
    return {name: weight for name, weight in weights.items() if weight != 0.0}
