"""Settings of algorithms and the registry class; the other modules hold shared helpers."""

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
"""Whether probability ratios are computed per chunk, per action, or per factor (token, denoising step)."""

_T = TypeVar("_T")


class Registry(Generic[_T]):
    """Maps names in configs to subclasses of ``base``; messages call them ``kind``."""

    def __init__(self, kind: str, base: Any, **classes: str) -> None:
        """``classes`` are entry points ``"module:Class"``, which ``get`` imports."""
        self.kind, self.base = kind, base
        self.classes: dict[str, type[_T] | str] = {**classes}

    def register(self, name: str, cls: Any = None) -> Any:
        """Make a class available to configs: call ``register("mine", Mine)``, or use it as a decorator."""
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
        """Return the class registered under a name, ignoring case."""
        found = look_up(self.kind, name, self.classes)
        cls: type[_T] = pkgutil.resolve_name(found) if isinstance(found, str) else found
        return cls


@configclass
class AlgorithmCfg(Config):
    """Settings of all algorithms."""

    device: str = "cpu"
    """Device on which rollouts are stored and the policy is trained."""
    learning_rate: Positive = 3e-4
    """Learning rate of Adam; the initial one if there is a schedule."""
    batch_size: Count = 64
    """Transitions per gradient step; the sizes of minibatches are evened out to differ by one at most."""
    gamma: Fraction = 0.99
    """Discount per environment step."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation: trades bias (0) for variance (1)."""
    max_grad_norm: Positive = 0.5
    """Maximum norm of the gradient, for clipping."""

    def located(self, folder: Path) -> Self:
        """Return these settings with relative paths resolved against a config's folder."""
        return self


@configclass
class MinibatchCfg(AlgorithmCfg):
    """Settings of algorithms that take gradient steps on minibatches."""

    n_epochs: Count = 10
    """Number of passes over each rollout."""
    clip_coef: Positive = 0.2
    """Clip range of the probability ratio: [1 - clip_coef, 1 + clip_coef]."""
    ent_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    _: KW_ONLY
    mixed_precision: Precision = "off"
    """Precision of networks in the update: off (float32), tf32 (faster float32 on a GPU), bf16 or fp16. With a reduced
    one, each update first evaluates the rollout again, so that ratios do not compare two precisions."""
    sequence_length: Count | None = None
    """For recurrent policies: steps per training sequence, a divisor of the rollout's length; default: all of it."""
    log_prob_per: Level = "chunk"
    """For policies that choose chunks of actions: one probability ratio per chunk or per action, or per ``token`` or
    ``denoising_step`` if the policy has them."""
    cuda_graphs: bool = True
    """On a GPU: capture the gradient step as a CUDA graph and replay it; if that is not possible, the log says why."""
    correction: Literal["none", "decoupled"] = "none"
    """For rollouts of an older policy: the plain loss, or the decoupled loss with importance weights. PPO then also
    computes advantages and returns with the current critic."""
    max_importance_weight: Positive = 5.0
    """Upper bound of the importance weights of the decoupled loss."""
    weight_decay: NotNegative = 0.0
    """Weight decay as in AdamW; biases, norms and standard deviations are excluded."""
    lr_warmup: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Number of updates over which the learning rate increases linearly, after those of value_warmup."""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "constant"
    """Learning rate: constant, decreasing linearly to zero, or adapted after each epoch to reach desired_kl."""


@configclass
class ClippedCfg(MinibatchCfg):
    """Settings of algorithms that clip probability ratios: PPO and GRPO."""

    _: KW_ONLY
    clip_coef_high: Positive | None = None
    """Upper clip range: the ratio is clipped to [1 - clip_coef, 1 + clip_coef_high]; default: clip_coef."""
    clip_coef_final: Positive | None = None
    """Final value of clip_coef, reached linearly; clip_coef_high is scaled by the same factor. Default: constant."""
    ent_coef_final: NotNegative | None = None
    """Final value of ent_coef, reached linearly; default: constant."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the initial policy; 0 keeps no copy of it."""
    desired_kl: Positive = 0.01
    """For the adaptive schedule: target KL divergence per epoch."""
    lr_min: Positive | None = None
    """For the adaptive schedule: minimum learning rate; default: 1e-5, or a tenth of learning_rate if that is less."""
    lr_max: Positive | None = None
    """For the adaptive schedule: maximum learning rate; default: 1e-2, or learning_rate if that is more."""
    target_kl: Positive | None = None
    """Skip the remaining epochs of an update once the mean KL divergence of an epoch exceeds this."""

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
        """Minimum and maximum learning rate of the adaptive schedule; they enclose ``learning_rate``."""
        low = min(1e-5, self.learning_rate / 10.0) if self.lr_min is None else self.lr_min
        return low, max(1e-2, self.learning_rate) if self.lr_max is None else self.lr_max
