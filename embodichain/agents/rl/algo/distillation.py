"""Distillation: a student policy with limited observations learns from a teacher with privileged ones.

The student collects rollouts. The teacher labels every state with its action or its action distribution, and the
student minimises the difference (DAgger without a dataset of older rollouts). Each uses its own observations: the
teacher for example the simulation state, the student cameras (``policy.actor_obs``).
"""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import gymnasium as gym
import torch
from pydantic import Field
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.base import MinibatchAlgorithm, Teacher
from embodichain.agents.rl.algo.gradient_steps import Meter
from embodichain.agents.rl.buffer.rollout_buffer import EVALUATED_ROWS, Minibatches, flatten_time_major
from embodichain.agents.rl.collector.weights import content_digest
from embodichain.agents.rl.models.actor_critic import NetworkPolicy
from embodichain.agents.rl.models.distributions import SQUASHED_LIMIT, SquashedGaussianHead
from embodichain.agents.rl.models.observation import space_entries
from embodichain.agents.rl.models.policy import Evaluation, Policy
from embodichain.agents.rl.utils import AlgorithmCfg, MinibatchCfg
from embodichain.agents.rl.utils.distributed import Ranks
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.config.classes import MISSING, Fraction, configclass
from embodichain.config.files import find_beside
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError, ConfigError

KEYS = ("observation", "reward", "done")


@configclass
class DistillationCfg(MinibatchCfg):
    """Configuration for distillation; settings of probability ratios, returns and entropy have no effect."""

    n_epochs: Annotated[int, Field(ge=1)] = 4
    """Number of passes over each rollout."""
    teacher: str = MISSING
    """Run (its best checkpoint) or checkpoint of the teacher, relative to the config's folder or the working
    directory."""
    loss: Literal["kl", "mse", "nll"] = "kl"
    """Loss: KL divergence from the teacher's to the student's distribution, mean squared error of the most likely
    actions, or negative log-likelihood of the teacher's most likely action."""
    teacher_share: tuple[Fraction, Fraction] = (0.0, 0.0)
    """Fraction of the envs in which the teacher acts instead of the student: initial and final value."""
    teacher_until: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Fraction of training after which teacher_share reaches its final value, linearly; at the latest in the last
    rollout."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Learning rate: constant, or decreasing linearly to zero."""

    def located(self, folder: Path) -> Self:
        """Return these settings with an absolute path of the teacher, so that a run can be resumed from anywhere."""
        if self.teacher is MISSING:
            raise ConfigError("teacher: expected the folder of a run or of a checkpoint, got none", "algorithm.cfg")
        return self.replace(teacher=find_beside(self.teacher, folder))

    def share_at(self, progress: float, rollout: float = 0.0) -> float:
        """Return the fraction of envs in which the teacher acts at a training ``progress`` in [0, 1].

        ``rollout`` is the progress per rollout.
        """
        first, last = self.teacher_share
        until = min(self.teacher_until, 1.0 - rollout)  # at the latest when the last rollout starts
        return first if progress == 0.0 else first + (last - first) * min(1.0, progress / max(until, 1e-9))


def mismatches(teacher: Teacher, observation_space: Any, action_space: Any, actions: Any = None) -> list[str]:
    """Return messages about why a teacher cannot label an environment with these spaces."""
    here, problems = {entry.name: entry for entry in space_entries(observation_space)}, []
    needed, policy = space_entries(teacher.observation_space), teacher.policy
    if isinstance(policy, NetworkPolicy):
        needed = [entry for entry in needed if entry in (*policy.encoder.vectors, *policy.encoder.images)]
    for entry in needed:
        name = entry.name or "the observation"
        if entry.name not in here:
            problems.append(f"observation {name} {list(entry.shape)}: the environment does not have it")
        elif here[entry.name].shape != entry.shape:
            problems.append(
                f"observation {name}: {list(entry.shape)} there, {list(here[entry.name].shape)} in the environment"
            )
    if action_space != teacher.action_space:
        problems.append(f"action space: {teacher.action_space} there, {action_space} in the environment")
    if actions is not None and teacher.actions is not None and actions != teacher.actions:
        problems.append(f"env.actions: {teacher.actions} there, {actions} in the environment")
    if policy.is_recurrent:
        problems.append("it is recurrent: expected a policy that needs one observation only")
    if policy.chunk_size > 1:
        problems.append(f"it chooses {policy.chunk_size} actions at a time: expected one")
    return problems


class Guided(Policy):
    """The policy that collects rollouts: the student, with the teacher acting in the first envs.

    Its state dict contains student, teacher and share of envs, so that collectors get all of them. Values are zero, as
    distillation does not use them.
    """

    has_critic = False
    share: Tensor

    def __init__(self, student: Policy, teacher: Policy | None = None) -> None:
        super().__init__()
        del self._buffers["version"]  # see the property
        self.student, self.teacher = student, teacher
        self.is_recurrent = student.is_recurrent
        self.register_buffer("share", torch.zeros((), device=student.device))
        self._rows: tuple[int, int] | None = None
        self._rows_tensor: Tensor | None = None  # _rows as a tensor, which CUDA graphs read

    @property
    def device(self) -> torch.device:
        return self.student.device

    @device.setter
    def device(self, device: torch.device) -> None:
        for policy in (self._modules.get("student"), self._modules.get("teacher")):
            if isinstance(policy, Policy):
                policy.device = device

    @property
    def version(self) -> Tensor:  # type: ignore[override]
        return self.student.version

    @property
    def generator(self) -> torch.Generator | None:
        return self.student.generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self.student.generator = generator

    @property
    def values_apart(self) -> bool:  # type: ignore[override]
        return self.student.values_apart

    @property
    def noise_steps(self) -> int | None:  # type: ignore[override]
        return self.student.noise_steps

    def draw_noise(self, num_envs: int) -> Tensor | None:
        return self.student.draw_noise(num_envs)

    def hold_noise(self, noise: Tensor | None) -> None:
        self.student.hold_noise(noise)

    def hold_rows(self, first: int, num_envs: int) -> None:
        if self.teacher is None or self._rows == (first, num_envs):
            return
        self._rows, rows = (first, num_envs), torch.tensor([float(first), float(num_envs)], device=self.device)
        self._rows_tensor = rows if self._rows_tensor is None else self._rows_tensor.copy_(rows)

    def initial_state(self, batch_size: int) -> Tensor | None:
        return self.student.initial_state(batch_size)

    def get_action(self, obs: Observation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        return self.act(obs, None, deterministic)[:3]

    def act(
        self, obs: Observation, state: Tensor | None = None, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        action, log_prob, value, state = self.student.act(obs, state, deterministic)
        return self._guide(obs, action), log_prob, torch.zeros_like(value), state

    def choose(self, obs: Observation) -> tuple[Tensor, Tensor]:
        action, log_prob = self.student.choose(obs)
        return self._guide(obs, action), log_prob

    def get_value(self, obs: Observation) -> Tensor:
        return torch.zeros(obs.shape[0], device=self.device)

    def evaluate_actions(self, obs: Observation, actions: Tensor, decision: TensorDictBase | None = None) -> Evaluation:
        return self.student.evaluate_actions(obs, actions)

    def evaluate_sequences(self, obs: Observation, actions: Tensor, state: Tensor, start: Tensor) -> Evaluation:
        return self.student.evaluate_sequences(obs, actions, state, start)

    def _guide(self, obs: Observation, action: Tensor) -> Tensor:
        """Replace the student's actions by the teacher's in the first ``share`` of all envs."""
        if self.teacher is None:
            return action
        rows = action.shape[0]
        count = (self.share * rows).round()
        if self._rows_tensor is not None:  # this group's part of the envs in which the teacher acts
            count = (self.share * self._rows_tensor[1]).round() - self._rows_tensor[0]
        guided = torch.arange(rows, device=action.device) < count
        own = self.teacher.get_action(obs, deterministic=True)[0].to(action.dtype)
        return torch.where(guided.view(-1, *[1] * (action.ndim - 1)), own, action)


class Distillation(MinibatchAlgorithm):
    """Distillation on rollouts ``[num_envs, num_steps]`` of the student; ``teach`` sets the teacher."""

    cfg_type: ClassVar[type[AlgorithmCfg]] = DistillationCfg
    cfg: DistillationCfg
    acting: Guided

    def __init__(self, cfg: DistillationCfg, policy: Policy) -> None:
        super().__init__(cfg, policy)
        if policy.has_decision or policy.chunk_size > 1:
            expected = "expected a policy whose decision is one action, which alone determines its probability"
            raise ConfigError(f"distill: {expected}; got {type(policy).__name__}", "policy")
        self.teacher: Teacher | None = None
        self.digest = ""
        """Hash of the teacher's weights."""
        self.acting = Guided(policy)
        self._shares: dict[int, float] = {}  # by version of the weights, as rollouts may come from older ones

    @property
    def teacher_source(self) -> str:
        return self.cfg.teacher

    def teach(self, teacher: Teacher, env: VecEnv | None = None, actions: Any = None) -> None:
        """Set the teacher; raise ``ConfigError`` if it does not fit ``env`` or the loss."""
        problems = [] if env is None else mismatches(teacher, env.observation_space, env.action_space, actions)
        if problems:
            raise ConfigError(problems, f"algorithm.cfg.teacher: {teacher.source}")
        student, other, loss = self.policy, teacher.policy, self.cfg.loss
        heads = [p.head for p in (student, other) if isinstance(p, NetworkPolicy)]
        continuous = isinstance(teacher.action_space, gym.spaces.Box | int)
        problem = None
        if loss == "kl" and (len(heads) < 2 or type(heads[0]) is not type(heads[1])):
            kinds = " and ".join(type(p.head if isinstance(p, NetworkPolicy) else p).__name__ for p in (student, other))
            problem = f"kl compares distributions of one kind, and those of student and teacher are {kinds}"
        elif loss == "mse" and not (continuous and isinstance(student, NetworkPolicy)):
            problem = "mse compares continuous actions of a policy made of networks"
        if problem is not None:
            raise ConfigError(f"loss: {problem}; choose {'nll' if loss == 'mse' else 'mse or nll'}", "algorithm.cfg")
        policy = other.eval().to(self.device).requires_grad_(False)
        policy.device = self.device
        self.teacher, self.digest = teacher, content_digest(policy)
        self.acting = Guided(self.policy, policy if max(self.cfg.teacher_share) > 0.0 else None)
        self._set_share(self.cfg.share_at(self.progress))

    def join(self, ranks: Ranks) -> None:
        """Join distributed training; all ranks must have the same teacher."""
        super().join(ranks)
        digests = ranks.exchange(self.digest)
        if len(set(digests)) > 1:
            raise ConfigError("teacher: the ranks found different policies there: copy one to all machines", "ranks")

    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Train the student on the teacher's labels for the states of a rollout; return the metrics to log."""
        cfg = self.cfg
        rollout = self._take(rollout, KEYS)
        self._initialize_statistics(rollout)

        # Labels of the teacher for all states of the rollout
        data = rollout.select("observation")
        data["label"] = self._labels(rollout)

        # Epochs of gradient steps on shuffled minibatches
        self._schedule_rate()
        minibatches, meter = self._minibatches(data, rollout), Meter()
        for _ in range(cfg.n_epochs):
            with closing(self._epoch(minibatches, meter)) as epoch:
                for batch, share in epoch:
                    self._step(batch, meter, share)
            meter.end_epoch("imitation_loss")

        metrics = meter.means() | {"learning_rate": self.optimizer.learning_rate}
        metrics["teacher_share"] = self._share_in(rollout)
        self._finish_update(rollout)
        following = self.progress if self.next_progress is None else self.next_progress
        self._set_share(cfg.share_at(following, max(0.0, following - self.progress)))
        return metrics

    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        with self.optimizer.autocast():
            loss = self._difference(batch)
        measures, auxiliary = {"imitation_loss": loss}, self.policy.take_auxiliary_loss()
        if auxiliary is not None:
            loss, measures["auxiliary_loss"] = loss + auxiliary, auxiliary
        return loss, measures

    def _difference(self, batch: TensorDictBase) -> Tensor:
        """Return the mean difference ``[]`` of the student from the teacher's labels."""
        policy, label = self.policy, batch["label"]
        if self.cfg.loss == "nll" or not isinstance(policy, NetworkPolicy):
            # L = -log pi(a_teacher | s)
            return -policy.evaluate(batch.clone(recurse=False).update({"action": label}))[0].mean()
        params = policy.action_params(batch)
        if self.cfg.loss == "mse":
            # L = E |a_student - a_teacher|^2 / action_dim, of the most likely actions
            return (policy.head.sample(params, deterministic=True)[0] - label).square().mean()
        # L = E KL(pi_teacher || pi)
        return policy.head.divergence(label, params).mean()

    @torch.no_grad()
    def _labels(self, rollout: TensorDictBase) -> Tensor:
        """Return the teacher's labels ``[num_envs, num_steps, ...]``: actions, or descriptions of distributions."""
        if self.teacher is None:
            raise ConfigError("teacher: expected a policy to learn from: call teach() first", "algorithm.cfg")
        teacher, (num_envs, num_steps) = self.teacher.policy, rollout.batch_size
        parts = []
        for part in flatten_time_major(rollout.select("observation")).split(EVALUATED_ROWS):
            if self.cfg.loss == "kl" and isinstance(teacher, NetworkPolicy):
                parts.append(teacher.head.describe(teacher.action_params(part)))
            else:
                parts.append(self._bounded(teacher.get_action(part["observation"], deterministic=True)[0]))
        return torch.cat(parts).unflatten(0, (num_steps, num_envs)).transpose(0, 1)

    def _bounded(self, action: Tensor) -> Tensor:
        """Clip actions to the action space, and to the range that the student can reach."""
        space = None if self.teacher is None else self.teacher.action_space
        if not isinstance(space, gym.spaces.Box):
            return action
        low, high = (torch.as_tensor(bound).to(action) for bound in (space.low, space.high))
        if isinstance(self.policy, NetworkPolicy) and isinstance(self.policy.head, SquashedGaussianHead):
            low, high = low.clamp(min=-SQUASHED_LIMIT), high.clamp(max=SQUASHED_LIMIT)
        return action.clamp(low, high)

    def _evaluate_again(self, minibatches: Minibatches, rollout: TensorDictBase) -> None:
        """Not needed, as the loss uses no values of the rollout that depend on precision."""

    def _set_share(self, share: float) -> None:
        """Set the fraction of envs in which the teacher acts, from the current version of the weights on."""
        version = int(self.policy.version)
        self._shares = {v: s for v, s in self._shares.items() if v < version} | {version: share}
        self.acting.share.fill_(share)

    def _share_in(self, rollout: TensorDictBase) -> float:
        """Return the mean share with which a rollout was collected, by its policy versions."""
        newest, versions = max(self._shares), rollout.get("policy_version", None)
        if versions is None:
            return self._shares[newest]
        found, counts = (part.tolist() for part in versions.unique(return_counts=True))
        used = [self._shares.get(version, self._shares[newest]) for version in found]
        self._shares = {v: share for v, share in self._shares.items() if v >= found[0] or v == newest}
        return sum(share * count for share, count in zip(used, counts, strict=True)) / sum(counts)

    def state_dict(self) -> dict[str, Any]:
        source = "" if self.teacher is None else self.teacher.source
        shares = {str(version): share for version, share in self._shares.items()}
        return super().state_dict() | {"teacher": {"source": source, "digest": self.digest}, "shares": shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = state["teacher"]
        if self.digest and known["digest"] != self.digest:
            source = "" if self.teacher is None else self.teacher.source
            raise CheckpointError(
                f"algorithm.cfg.teacher: {source} holds another policy than the one this run learns from, which was in "
                f"{known['source']}: put that one back, or name a copy of it: --resume RUN --algorithm.cfg.teacher "
                "CHECKPOINT. To learn from the other one, begin a new run with --trainer.init_from RUN"
            )
        super().load_state_dict(state)
        self._shares = {int(version): share for version, share in state.get("shares", {}).items()}
        self._set_share(self._shares.get(int(self.policy.version), self.cfg.share_at(self.progress)))
