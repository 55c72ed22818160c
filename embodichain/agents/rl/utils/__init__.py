"""What algorithms, collectors and policies share: the settings of algorithms here, observations and ranks beside it."""

import pkgutil
from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import Field

from embodichain.agents.rl.utils.tensordicts import dict_to_tensordict, flatten_dict_observation
from embodichain.config.classes import Config, Count, Fraction, NotNegative, Positive, configclass
from embodichain.errors import ConfigError, look_up, same_name
from embodichain.utils.torch_runtime import torch_threads

__all__ = [
    "AlgorithmCfg",
    "ClippedCfg",
    "MinibatchCfg",
    "dict_to_tensordict",
    "flatten_dict_observation",
    "torch_threads",
]

Precision = Literal["off", "tf32", "bf16", "fp16"]
Level = Literal["chunk", "action", "token", "denoising_step"]
"""Whether the probability ratio is that of a whole chunk, of each action, or of each factor: token, denoising step."""

_T = TypeVar("_T")


class Registry(Generic[_T]):
    """Classes derived from ``base`` by name, for configs; ``kind`` is what messages call them."""

    def __init__(self, kind: str, base: Any, **classes: str) -> None:
        """``classes`` are entry points ``"module:Class"``, which are imported when their name is asked for."""
        self.kind, self.base = kind, base
        self.classes: dict[str, type[_T] | str] = {**classes}

    def register(self, name: str, cls: Any = None) -> Any:
        """Make a class available to configs: as ``register("mine", Mine)``, or as the decorator of the class."""
        if cls is None:
            return partial(self.register, name)
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise TypeError(f"{name!r}: {cls!r} must derive from {self.base.__name__}")
        taken = self.classes.setdefault(same_name(name, self.classes) or name, cls)
        if taken not in (cls, f"{cls.__module__}:{cls.__qualname__}"):
            owner = taken.partition(":")[2] if isinstance(taken, str) else taken.__name__
            raise ConfigError(f"the {self.kind} name {name!r} is taken by {owner}", "registration")
        return cls

    def names(self) -> list[str]:
        """Return the names that a config may use, sorted."""
        return sorted(self.classes)

    def get(self, name: str) -> type[_T]:
        """Return the class registered under a name, whatever its case."""
        found = look_up(self.kind, name, self.classes)
        cls: type[_T] = pkgutil.resolve_name(found) if isinstance(found, str) else found
        return cls


@configclass
class AlgorithmCfg(Config):
    """Minimal algorithm configuration shared across RL algorithms."""

    device: str = "cpu"
    """Where the rollout is stored and the policy is trained."""
    learning_rate: Positive = 3e-4
    """Step size of Adam (the first one, where a schedule changes it)."""
    batch_size: Count = 64
    """Transitions per gradient step; the last minibatches share what is left evenly."""
    gamma: Fraction = 0.99
    """Discount per environment step."""
    gae_lambda: Fraction = 0.95
    """Weight of longer returns in generalised advantage estimation."""
    max_grad_norm: Positive = 0.5
    """The gradient is scaled down to this norm when it is longer."""

    def located(self, folder: Path) -> Self:
        """Return these settings with absolute paths in the place of those that are relative to a config's folder."""
        return self


@configclass
class MinibatchCfg(AlgorithmCfg):
    """The settings of algorithms that learn by gradient steps on minibatches."""

    n_epochs: Count = 10
    """Passes over each rollout."""
    clip_coef: Positive = 0.2
    """The probability ratio counts inside [1 - clip_coef, 1 + clip_coef] only."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    _: KW_ONLY
    mixed_precision: Precision = "off"
    """Precision of the networks in the update: off (float32), tf32 (float32, faster on a GPU), bf16 or fp16. Before a
    reduced one learns, it evaluates the rollout once more, so that ratios do not compare two precisions."""
    sequence_length: Count | None = None
    """For recurrent policies: steps per training sequence, a divisor of the rollout's; default: all of them."""
    log_prob_per: Level = "chunk"
    """For policies that choose chunks of actions: one probability ratio per chunk, or one for each action in it. For
    those whose decisions have more factors also one for each ``token`` or ``denoising_step``."""
    cuda_graphs: bool = True
    """On a GPU: record the gradient step once as a CUDA graph and replay it; the log says where that cannot be."""
    correction: Literal["none", "decoupled"] = "none"
    """For rollouts older than the policy: the plain loss, or the decoupled one, which weighs them by their probability
    under the present policy. PPO then also takes advantages and returns by the present critic."""
    max_importance_weight: Positive = 5.0
    """Bound of that weight."""
    weight_decay: NotNegative = 0.0
    """Share of its size, times the step size, that a weight loses in each gradient step, as in AdamW; biases, norms and
    standard deviations lose nothing."""
    lr_warmup: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Updates at the beginning over which the step size rises to its full size; those of value_warmup come before."""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """Step size: constant, falling to zero over the training, or adapted after each epoch to keep desired_kl."""


@configclass
class ClippedCfg(MinibatchCfg):
    """The settings of algorithms that clip probability ratios: PPO and GRPO."""

    _: KW_ONLY
    clip_coef_high: Positive | None = None
    """The upper bound of the ratio is 1 + clip_coef_high, the lower one stays; default: clip_coef for both."""
    clip_coef_final: Positive | None = None
    """clip_coef at the end of the training, to which it changes linearly, and clip_coef_high by the same factor."""
    ent_coef_final: NotNegative | None = None
    """ent_coef at the end of the training, to which it changes linearly; default: it stays."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the policy as it was at first; 0 needs no such reference."""
    desired_kl: Positive = 0.01
    """For the adaptive schedule: the change of the policy per epoch, as KL divergence, to aim at."""
    lr_min: Positive | None = None
    """For the adaptive schedule: the least step size; default: 1e-5, or a tenth of learning_rate if that is less."""
    lr_max: Positive | None = None
    """For the adaptive schedule: the largest step size; default: 1e-2, or learning_rate if that is more."""
    target_kl: Positive | None = None
    """The remaining epochs are left out once an epoch's mean KL divergence exceeds this."""

    def __post_init__(self) -> None:
        rate, problems = self.learning_rate, []
        if self.lr_min is not None and self.lr_min > rate:
            problems.append(f"lr_min: expected at most learning_rate, {rate}, got {self.lr_min}")
        if self.lr_max is not None and self.lr_max < rate:
            problems.append(f"lr_max: expected at least learning_rate, {rate}, got {self.lr_max}")
        if problems and self.lr_schedule == "adaptive":
            raise ConfigError(problems, type(self).__name__)

    @property
    def lr_bounds(self) -> tuple[float, float]:
        """Least and largest step size of the adaptive schedule; they enclose ``learning_rate``."""
        low = min(1e-5, self.learning_rate / 10.0) if self.lr_min is None else self.lr_min
        return low, max(1e-2, self.learning_rate) if self.lr_max is None else self.lr_max
