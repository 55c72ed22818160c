"""Base classes and the registry of algorithms.

``BaseAlgorithm`` is the interface, ``MinibatchAlgorithm`` adds gradient steps, ``ClippedAlgorithm`` clipped ratios.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from torch import Tensor

from embodichain.agents.rl.algo.advantages import next_values
from embodichain.agents.rl.algo.gradient_steps import Evaluated, GraphedSteps, Meter, PolicyOptimizer
from embodichain.agents.rl.buffer.rollout_buffer import (
    EVALUATED_ROWS,
    Minibatches,
    RolloutBuffer,
    check_rollout,
    evaluate_rollout,
    flatten_time_major,
    recurrent_states,
)
from embodichain.agents.rl.collector.base import StepCallback
from embodichain.agents.rl.collector.sync_collector import RolloutStart, SyncCollector
from embodichain.agents.rl.models.policy import Policy
from embodichain.agents.rl.utils import AlgorithmCfg, ClippedCfg, MinibatchCfg, Registry
from embodichain.agents.rl.utils.distributed import Ranks, SharedStatistics
from embodichain.agents.rl.utils.ratios import Number, kl_estimate, log_ratio, per_decision
from embodichain.agents.rl.utils.tensordicts import Observation
from embodichain.envs.vec_env import VecEnv
from embodichain.errors import CheckpointError, ConfigError, RolloutError

_LOG = logging.getLogger(__name__)
_LARGE_KL = 1.0
"""Mean KL divergence of an update above which a warning is logged."""
CPU_ROWS = 2048
"""Transitions per backward pass and CPU thread: the activations of a typical network then fit into the cache."""


@dataclass(frozen=True)
class Teacher:
    """A trained policy to learn from, with its spaces and its origin."""

    policy: Policy
    """The policy, in evaluation mode."""
    observation_space: gym.Space[Any] | int
    action_space: gym.Space[Any] | int
    source: str
    """Checkpoint folder."""
    actions: Any = None
    """``env.actions`` of the config it was trained with, ``None`` if unknown."""


class BaseAlgorithm(ABC):
    """Base class for RL algorithms; a subclass must implement ``update(rollout)``.

    Without a trainer, call ``initialize_buffer``, then ``collect_rollout`` and ``update()`` in turn.
    """

    device: torch.device
    """Device on which the policy is trained."""
    cfg_type: ClassVar[type[AlgorithmCfg]] = AlgorithmCfg
    """Class of the settings."""
    one_version_per_rollout: ClassVar[bool] = False
    """Whether all transitions of a rollout must come from one version of the policy."""
    needs_critic: ClassVar[bool] = False
    """Whether the policy must have a critic."""
    start_rollout: RolloutStart | None = None
    """Picklable function that resets the environment before each rollout; ``None`` continues the episodes."""
    return_discount: float | None = None
    """Discount of the ``discounted_return`` that collectors add to rollouts; ``None`` adds none."""

    def __init__(self, cfg: AlgorithmCfg, policy: Policy) -> None:
        policy.check()
        if self.needs_critic and not policy.has_critic:
            problem = f"{type(self).__name__} learns from values, and {type(policy).__name__} has none"
            raise ConfigError(f"{problem}: expected a policy with a critic, such as actor_critic", "policy")
        self.cfg = cfg
        self.device = torch.device(cfg.device)
        self.policy = policy.to(self.device)
        self.policy.device = self.device
        self.acting: Policy = self.policy
        """The policy that collectors use; differs from ``policy`` if a teacher acts in some envs."""
        self.ranks = Ranks()
        """The processes of distributed training; see ``join``."""
        self.progress = 0.0
        """Fraction of training that is done, in [0, 1]; set by the trainer, used by schedules."""
        self.next_progress: float | None = None
        """``progress`` after the coming update, when the next rollout starts; ``None`` if unknown."""
        self.buffer: RolloutBuffer | None = None
        self._collector: SyncCollector | None = None
        self._rollout: TensorDictBase | None = None
        self._has_statistics = False
        self._rollout_counted = False
        """Whether the observation statistics include the rollout of this update already."""

    @abstractmethod
    def update(self, rollout: TensorDictBase | None = None) -> dict[str, float]:
        """Train on a rollout ``[num_envs, num_steps]`` (default: that of ``collect_rollout``); return metrics."""

    def check_num_envs(self, num_envs: int) -> None:  # noqa: B027 - any number is valid by default
        """Raise ``ConfigError`` if the algorithm cannot work with this number of envs."""

    @property
    def teacher_source(self) -> str | None:
        """Run or checkpoint of the teacher, which is then passed to ``teach``; ``None`` if there is no teacher."""
        return None

    def teach(self, teacher: Teacher, env: VecEnv | None = None, actions: Any = None) -> None:
        """Set the teacher; raise ``ConfigError`` if it does not fit ``env`` or its ``env.actions``."""
        raise ConfigError(f"teacher: {type(self).__name__} learns from none", "algorithm.cfg")

    def join(self, ranks: Ranks) -> None:
        """Join distributed training; the policy becomes a copy of the first rank's. Subclasses may support it."""
        if ranks.count > 1:
            problem = f"{type(self).__name__} cannot train on several ranks: it does not add up gradients over them"
            raise ConfigError(problem, "algorithm")

    def initialize_buffer(
        self, num_steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device | str | None = None
    ) -> None:
        """Create the buffer for ``collect_rollout``; nested observations are stored flattened."""
        self.check_num_envs(num_envs)
        self.buffer = RolloutBuffer(num_steps, num_envs, obs_dim, action_dim, device or self.device)

    def collect_rollout(
        self,
        env: VecEnv,
        policy: Policy,
        obs: Observation | None,
        num_steps: int,
        on_step_callback: StepCallback | None = None,
    ) -> dict[str, Any]:
        """Collect ``num_steps`` steps of all envs; return statistics: reward terms, metrics, episode returns.

        ``obs`` is the current observation. ``None`` continues after the last rollout; the first call then resets.
        """
        policy = self.acting if policy is self.policy else policy
        collector = self._collector
        if collector is None or collector.env is not env or collector.policy is not policy:
            options: dict[str, Any] = {"start_rollout": self.start_rollout, "return_discount": self.return_discount}
            collector = SyncCollector(env, policy, self.device, buffer=self.buffer, **options)
            self._collector = collector
            if obs is not None:
                collector.begin(obs)
        elif obs is not None:
            collector.obs = obs.to(self.device)
        collector.callback = on_step_callback
        self._rollout = collector.collect(num_steps)
        return dict(collector.statistics())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithm without policy, config and random state: nested dicts, tensors, numbers."""
        return {"progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from ``state_dict``."""
        self.progress = state["progress"]
        self._has_statistics = False  # the policy, which is restored by itself, may have none

    def _take(self, rollout: TensorDictBase | None, keys: Iterable[str]) -> TensorDictBase:
        """Check the rollout (default: the collected one) and return it on the algorithm's device."""
        if rollout is None:
            rollout, self._rollout = self._rollout, None
            if rollout is None:
                raise RolloutError("update() without a rollout needs collect_rollout() before it, each time")
        policy = self.policy
        check_rollout(rollout, (*keys, *["decision"] * policy.has_decision, *["hidden"] * policy.is_recurrent))
        self.check_num_envs(rollout.batch_size[0])
        return rollout if rollout["reward"].device == self.device else rollout.to(self.device)

    def _initialize_statistics(self, rollout: TensorDictBase) -> bool:
        """Initialise the policy's observation statistics from its first rollout; return whether this was done now.

        This comes before the first update: after one on observations that are not normalised, a policy learns less for
        a long time.
        """
        self._rollout_counted = False  # still set if the last update failed
        if self._has_statistics or self._freezes_statistics:
            return False
        if self.policy.lacks_statistics:
            self._add_statistics(rollout)
            self._rollout_counted = True
            if self.policy.is_recurrent:
                rollout["hidden"] = recurrent_states(self.policy, rollout)
        self._has_statistics = True
        return self._rollout_counted

    @torch.no_grad()
    def _add_statistics(self, rollout: TensorDictBase) -> None:
        """Add the observations of a rollout to the policy's statistics."""
        for part in flatten_time_major(rollout.select("observation")).split(EVALUATED_ROWS):
            self.policy.update_normalizer(part["observation"])

    def _finish_update(self, rollout: TensorDictBase) -> None:
        """Update the policy's observation statistics, and increment its version."""
        if not self._freezes_statistics and not self._rollout_counted:
            self._add_statistics(rollout)
        self._rollout_counted = False
        with torch.no_grad():
            self.policy.version += 1

    @property
    def _freezes_statistics(self) -> bool:
        """Whether the policy's observation statistics are frozen in this update."""
        return False


class MinibatchAlgorithm(BaseAlgorithm):
    """An algorithm whose update runs epochs of gradient steps on shuffled minibatches.

    ``update`` of a subclass calls ``_step`` for each minibatch of ``_epoch``. ``_step`` minimises ``_loss``. On a GPU,
    ``graphs`` may replay the steps of a whole epoch instead.
    """

    cfg: MinibatchCfg
    validity_key: ClassVar[str | None] = None
    """Key of the mask of valid transitions, if the loss uses one; minibatches can then be padded."""

    def __init__(self, cfg: MinibatchCfg, policy: Policy) -> None:
        super().__init__(cfg, policy)
        self.updates = 0
        """Number of updates so far, including those before a resume."""
        self.critic_only_updates = 0
        """Number of initial updates that train only the critic."""
        self.optimizer = PolicyOptimizer(
            policy, cfg.learning_rate, cfg.max_grad_norm, cfg.mixed_precision, cfg.weight_decay, self._value_rate()
        )
        self.graphs: GraphedSteps | None = None
        """Replays epochs of ``_step`` as CUDA graphs."""
        if self.device.type == "cuda" and cfg.cuda_graphs:
            self.graphs = GraphedSteps(self._step, self.optimizer, self.validity_key)

    def join(self, ranks: Ranks) -> None:
        """Join distributed training: minibatch k consists of the k-th minibatches of all ranks."""
        self.ranks = ranks
        if ranks.count == 1:
            return
        ranks.copy_first(self.policy)
        for module in self.policy.modules():
            if isinstance(module, SharedStatistics):
                module.share = ranks.share_moments
        if self.graphs is not None:
            _LOG.info("gradient steps are not recorded as CUDA graphs, as gradients are added up over ranks in each")
            self.graphs = None

    def _value_rate(self) -> float | None:
        """Return the learning rate of the critic, ``None`` if it has none of its own."""
        return None

    def _schedule_rate(self) -> None:
        """Set the learning rate of an update; an adaptive one is left as it is after warmup."""
        cfg, past = self.cfg, self.updates - self.critic_only_updates
        rate = cfg.learning_rate * (1.0 - self.progress) if cfg.lr_schedule == "linear" else cfg.learning_rate
        if 0 <= past < cfg.lr_warmup:
            self.optimizer.learning_rate = rate * ((past + 1) / cfg.lr_warmup)
        elif cfg.lr_schedule == "linear":
            self.optimizer.learning_rate = rate

    @property
    def _only_critic(self) -> bool:
        """Whether this update trains only the critic."""
        return self.updates < self.critic_only_updates

    @property
    def _freezes_statistics(self) -> bool:
        return self._only_critic  # new statistics would change the actions

    def _finish_update(self, rollout: TensorDictBase) -> None:
        super()._finish_update(rollout)
        self.updates += 1

    def _epoch(self, minibatches: Minibatches, meter: Meter) -> Generator[tuple[TensorDictBase, float], None, None]:
        """Yield ``(minibatch, share)`` for each ``_step`` of one epoch; ``share`` is this rank's part of it.

        With CUDA graphs, the gradient steps run here and nothing is yielded.
        """
        with self._gradient_steps(), self.policy.only_critic_learns() if self._only_critic else nullcontext():
            if self.graphs is not None and not self._only_critic:
                sums, steps = self.graphs.run_epoch(minibatches)
                meter.add(sums, steps=steps)
            else:
                for chosen, share in self._shuffled(minibatches):
                    yield minibatches.gather(chosen), share

    @contextmanager
    def _gradient_steps(self) -> Iterator[None]:
        """Context of gradient steps: their matmul precision, no dropout, and all threads."""
        two_networks = self.needs_critic and not self.optimizer.is_reduced  # autocast holds in one thread only
        steps = self.policy.in_gradient_steps(self.cfg.batch_size) if two_networks else nullcontext()
        with self.optimizer.matmul_precision(), self.policy.without_dropout(), steps:
            yield

    @abstractmethod
    def _loss(self, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch and the metrics to log."""

    def _prepare(self, batch: TensorDictBase, counts: bool) -> None:
        """Hook that runs on each whole minibatch before it is split; does nothing by default.

        ``counts`` is false if this rank has no rows in the minibatch, and ``batch`` is a placeholder.
        """

    def _step(self, batch: TensorDictBase, meter: Meter, share: float = 1.0) -> None:
        """Take one gradient step on a minibatch, of which this rank holds the fraction ``share``.

        On a CPU, gradients of a large minibatch are accumulated over smaller pieces, which reduces memory traffic.
        """
        self._prepare(batch, share > 0.0)
        own = meter if self.ranks.count == 1 else Meter()
        rows, piece = batch.numel(), CPU_ROWS * torch.get_num_threads()
        in_pieces = rows > piece and batch.batch_dims == 1 and self.device.type == "cpu"
        for part in batch.split(piece) if in_pieces else (batch,):
            weight = share * part.numel() / rows if in_pieces else share
            loss, measures = self._loss(part)
            self.optimizer.backward(loss, weight)
            own.add(measures, weight)
        if own is not meter:
            meter.add(self.ranks.sum_gradients(self.optimizer.parameters, own.epoch_sums))
        meter.add({"grad_norm": self.optimizer.step()}, steps=1)

    def _rate_settings(self) -> dict[str, Any]:
        """Return the settings that determine the learning rate."""
        warmup = {"lr_warmup": self.cfg.lr_warmup} if self.cfg.lr_warmup else {}
        return {"learning_rate": self.cfg.learning_rate, "lr_schedule": self.cfg.lr_schedule, **warmup}

    def _minibatches(self, data: TensorDictBase, rollout: TensorDictBase, valid: Tensor | None = None) -> Minibatches:
        """Split ``data`` into minibatches; all ranks get the same number."""
        length: int | None = None
        if self.policy.is_recurrent:
            data.update(rollout.select("hidden", "done"))
            length = self.cfg.sequence_length or rollout.batch_size[1]
        minibatches = Minibatches(data, self.cfg.batch_size, sequence_length=length, valid=valid)
        if self.ranks.count > 1:
            minibatches.cut_together(self.ranks.gather(torch.tensor(minibatches.items.numel())).tolist())
        if self.optimizer.is_reduced:
            self._evaluate_again(minibatches, rollout)
        return minibatches

    @torch.no_grad()
    def _evaluate_again(self, minibatches: Minibatches, rollout: TensorDictBase) -> None:
        """Compute old log-probabilities and values again, in the reduced precision of the update.

        Otherwise, ratios would compare two precisions. Transitions of older weights are skipped, unless the loss is
        decoupled, which compares with the current weights everywhere.
        """
        rows = minibatches.rows
        old = {name: rows[name].clone() for name in ("sample_log_prob", "value") if name in rows.keys()}  # noqa: SIM118
        is_present = torch.ones(rows.batch_size, dtype=torch.bool, device=minibatches.device)
        if self.cfg.correction == "none" and "policy_version" in rollout.keys():  # noqa: SIM118
            is_present = flatten_time_major(rollout.select("policy_version"))["policy_version"] == self.policy.version
        for chosen, evaluated in self._evaluations(minibatches):
            index, shape = minibatches.locate(chosen)
            for name, new in zip(("sample_log_prob", "value"), evaluated, strict=True):
                if name in old and new is not None:
                    now, known = new.float().flatten(0, len(shape) - 1), old[name][index]
                    mask = is_present[index].view(-1, *[1] * (known.ndim - 1))
                    old[name][index] = torch.where(mask, now, known)
        rows.update(old)

    def _evaluations(self, minibatches: Minibatches) -> Iterator[tuple[Tensor, Evaluated]]:
        """Yield the items of each minibatch, and their log-probabilities and values in the precision of the update."""

        def evaluate(batch: TensorDictBase) -> Evaluated:
            with self._gradient_steps(), self.optimizer.autocast():
                log_prob, _, value = self.policy.evaluate(batch)
            return log_prob, value

        if self.graphs is not None and self.graphs.replays_evaluations:
            yield from self.graphs.evaluate(minibatches, evaluate)
            return
        for chosen in minibatches.items.tensor_split(max(1, minibatches.count)):
            if chosen.numel():
                yield chosen, evaluate(minibatches.gather(chosen))

    def _shuffled(self, minibatches: Minibatches) -> Iterator[tuple[Tensor, float]]:
        """Yield the items of each minibatch of an epoch, and this rank's share of its transitions."""
        order = minibatches.draw()
        if self.validity_key is None or not self.policy.is_recurrent:
            shares = minibatches.shares(self.ranks.rank)
        else:
            valid = minibatches.rows[self.validity_key]
            counts = [int(valid[minibatches.locate(chosen)[0]].sum()) for chosen in order]
            weights = torch.tensor(counts, dtype=torch.float64)
            shares = (weights / self.ranks.sum(weights)).tolist()
        for chosen, share in zip(order, shares, strict=True):
            # An empty minibatch gets an arbitrary item, as its share is zero.
            yield chosen if chosen.numel() else chosen.new_zeros(1), share

    def state_dict(self) -> dict[str, Any]:
        own = {"optimizer": self.optimizer.state_dict(), "rate": self._rate_settings(), "updates": self.updates}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = state.get("updates", self.critic_only_updates + self.cfg.lr_warmup)
        self.optimizer.load_state_dict(state["optimizer"])
        own = self._rate_settings()
        if state.get("rate", own) != own:  # the settings have changed since: discard the scheduled learning rate
            self.optimizer.learning_rate = self.cfg.learning_rate
        if self.graphs is not None:  # Adam's state was reallocated
            self.graphs.forget()


class ClippedAlgorithm(MinibatchAlgorithm):
    """An algorithm with clipped probability ratios, schedules, and an optional KL penalty to a reference policy.

    ``update`` of a subclass prepares the data, calls ``_add_reference``, and calls ``_step`` for each of ``_epochs``.
    """

    cfg: ClippedCfg

    def __init__(self, cfg: ClippedCfg, policy: Policy) -> None:
        level, factors = cfg.log_prob_per, policy.factors
        if level not in ("chunk", "action") and factors is not None and level not in factors:
            expected = f"expected one of chunk, {', '.join(('action', *factors))}, which {type(policy).__name__} has"
            raise ConfigError(f"log_prob_per: {expected}, got {level}", "algorithm.cfg")
        super().__init__(cfg, policy)
        self.reference = _frozen_copy(policy) if cfg.kl_coef > 0.0 else None
        """Frozen copy of the initial policy for the KL penalty; parameters that are not trained are shared."""
        high = cfg.clip_coef if cfg.clip_coef_high is None else cfg.clip_coef_high
        self.clip = self._coefficient(cfg.clip_coef, cfg.clip_coef_final)
        """Lower clip range: ratios are clipped at ``1 - clip``."""
        self.clip_high = self._coefficient(high, cfg.clip_coef_final)
        """Upper clip range: ratios are clipped at ``1 + clip_high``."""
        self.ent_coef = self._coefficient(cfg.ent_coef, cfg.ent_coef_final)
        """Weight of the entropy bonus."""
        self._warned_of_kl = False

    def _coefficient(self, first: float, final: float | None) -> Number:
        """Return a coefficient: a tensor if it has a schedule, as CUDA graphs record plain numbers as constants."""
        return first if final is None else torch.tensor(first, device=self.device)

    def _schedule_coefficients(self) -> dict[str, float]:
        """Set and return the coefficients that depend on the training progress."""
        cfg, scheduled = self.cfg, {}
        if isinstance(self.ent_coef, Tensor) and cfg.ent_coef_final is not None:
            scheduled["ent_coef"] = _between(cfg.ent_coef, cfg.ent_coef_final, self.progress)
            self.ent_coef.fill_(scheduled["ent_coef"])
        if isinstance(self.clip, Tensor) and isinstance(self.clip_high, Tensor) and cfg.clip_coef_final is not None:
            scheduled["clip_coef"] = clip = _between(cfg.clip_coef, cfg.clip_coef_final, self.progress)
            self.clip.fill_(clip)
            self.clip_high.fill_(clip if cfg.clip_coef_high is None else cfg.clip_coef_high * (clip / cfg.clip_coef))
        return scheduled

    def join(self, ranks: Ranks) -> None:
        super().join(ranks)
        if self.reference is not None:
            ranks.copy_first(self.reference)

    def _normalize_first(self, rollout: TensorDictBase) -> None:
        """Initialise the observation statistics with the first rollout, and evaluate its actions again under them."""
        if not self._initialize_statistics(rollout):
            return
        if self.reference is not None:
            known = dict(self.policy.named_buffers())
            for name, buffer in self.reference.named_buffers():
                buffer.copy_(known[name])  # still the initial policy, now with statistics
        with torch.no_grad():
            log_prob, value = evaluate_rollout(self.policy, rollout, self.cfg.batch_size)
            rollout["sample_log_prob"] = log_prob.float()
            if self.needs_critic:
                value = value.float()
                rollout["value"], rollout["next_value"] = value, next_values(rollout, value)

    def _add_reference(self, data: TensorDictBase, rollout: TensorDictBase) -> None:
        """Add ``reference_log_prob``, the log-probabilities under the reference policy, if there is one."""
        if self.reference is not None:
            with torch.no_grad(), self.optimizer.matmul_precision(), self.optimizer.autocast():
                log_prob, _ = evaluate_rollout(self.reference, rollout, self.cfg.batch_size)
                data["reference_log_prob"] = log_prob.float()

    def _reference_kl(self, log_prob: Tensor, batch: TensorDictBase) -> Tensor | None:
        """Return non-negative estimates ``[rows]`` of ``KL(pi || pi_ref) = E[pi_ref / pi - 1 - log(pi_ref / pi)]``."""
        if self.reference is None:
            return None
        log_r = log_ratio(batch["reference_log_prob"], log_prob, batch, self.cfg.log_prob_per)
        return per_decision(kl_estimate(log_r), batch)

    def _epochs(self, minibatches: Minibatches, meter: Meter) -> Generator[tuple[TensorDictBase, float], None, None]:
        """Yield ``(minibatch, share)`` for each ``_step`` of all epochs, or until ``target_kl`` is exceeded."""
        cfg = self.cfg
        self._schedule_rate()
        adapts = cfg.lr_schedule == "adaptive" and self.updates >= self.critic_only_updates + cfg.lr_warmup
        for _ in range(cfg.n_epochs if len(minibatches) else 0):
            yield from self._epoch(minibatches, meter)
            epoch_kl = meter.end_epoch("approx_kl")
            if adapts:
                self.optimizer.adapt_learning_rate(epoch_kl, cfg.desired_kl, cfg.lr_bounds)
            if cfg.target_kl is not None and float(epoch_kl) > cfg.target_kl:  # the only GPU synchronisation
                break

    def _measures(self, meter: Meter) -> dict[str, float]:
        """Return the metrics of an update; log a warning once if its KL divergence is too large."""
        means = meter.means()
        if means.get("approx_kl", 0.0) > _LARGE_KL and not self._warned_of_kl:
            self._warned_of_kl = True
            _LOG.warning(
                "an update changed the policy by a KL divergence of %.3g, from which it may not recover: lower "
                "algorithm.cfg.learning_rate (now %.1e), %sor stop such updates early (target_kl: %g)",
                means["approx_kl"],
                self.optimizer.learning_rate,
                "" if self.cfg.lr_warmup else "increase it gradually (lr_warmup: 10), ",
                self.cfg.desired_kl,
            )
        return means | self.optimizer.rates() | {"epochs": float(meter.epochs)}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.reference is None:
            return state
        shared = {parameter.data_ptr() for parameter in self.policy.parameters()}
        held = self.reference.state_dict()
        return state | {"reference": {name: held[name] for name in held if held[name].data_ptr() not in shared}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.cfg.lr_schedule == "adaptive":  # the bounds may have changed
            low, high = self.cfg.lr_bounds
            self.optimizer.learning_rate = min(max(self.optimizer.learning_rate, low), high)
        if self.reference is not None:
            if "reference" not in state:
                raise CheckpointError(
                    f"algorithm.cfg.kl_coef is {self.cfg.kl_coef}, but the run was trained without a reference policy, "
                    "which the checkpoint would have to hold: resume it with --algorithm.cfg.kl_coef 0"
                )
            self.reference.load_state_dict(self.reference.state_dict() | state["reference"])


def _frozen_copy(policy: Policy) -> Policy:
    """Return a frozen copy; parameters that are not trained are shared."""
    untrained: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
    return copy.deepcopy(policy, untrained).eval().requires_grad_(False)


def _between(first: float, final: float, progress: float) -> float:
    return first + (final - first) * progress


ALGORITHMS = Registry[BaseAlgorithm](
    "algorithm",
    BaseAlgorithm,
    ppo="embodichain.agents.rl.algo.ppo:PPO",
    grpo="embodichain.agents.rl.algo.grpo:GRPO",
    distill="embodichain.agents.rl.algo.distillation:Distillation",
)
register_algo, get_algo_class, get_registered_algo_names = ALGORITHMS.register, ALGORITHMS.get, ALGORITHMS.names


def build_algo(
    name: str, cfg_kwargs: Mapping[str, Any], policy: Policy, device: torch.device | str | None = None
) -> BaseAlgorithm:
    """Build an algorithm by name; ``device`` is the default of the setting ``device``."""
    algo_cls = get_algo_class(name)
    settings = dict(cfg_kwargs)
    if device is not None:
        settings.setdefault("device", str(device))
    return algo_cls(algo_cls.cfg_type.from_dict(settings, source="algorithm"), policy)
