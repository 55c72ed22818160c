"""Does an environment keep the contract of ``VecEnv``? Plays it and says what is wrong, and what to do about it.

::

    problems = check_env(env)                                # of any VecEnv, ours or yours; [] is what you want
    results = run_checks(env, factory=lambda n: make(n))     # all checks, with those that passed or did not apply

The environment is reset, played beyond its time limit (1000 random steps at most) and closed. With a ``factory`` that
makes it for a given ``num_envs``, the independence of ``num_envs`` is checked as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from embodichain.envs.checker import checks as behaviour
from embodichain.envs.checker import checks as interface
from embodichain.envs.checker import checks as structure
from embodichain.envs.checker.probe import Check, Finding, NotApplicable, Probe
from embodichain.envs.vec_env import VecEnv

CHECKS: dict[str, Check] = {
    "spaces": structure.check_spaces,
    "reset": structure.check_reset,
    "step": structure.check_step,
    "final observation": behaviour.check_final_observation,
    "kept results": behaviour.check_kept,
    "time limit": behaviour.check_time_limit,
    "seed": behaviour.check_seed,
    "num_envs": behaviour.check_num_envs,
    "episode seed": behaviour.check_episode_seed,
    "partial reset": behaviour.check_partial_reset,
    "state": behaviour.check_state,
    "actions": interface.check_actions,
    "expert": interface.check_expert,
    "close": interface.check_close,
}
"""All checks in the order they are made; each one's docstring says what it is about."""

_BASIC = ("spaces", "reset", "step")  # nothing else makes sense where one of these fails


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an environment."""

    check: str
    expected: str
    got: str
    advice: str

    def __str__(self) -> str:
        return f"{self.check}: expected {self.expected}; got {self.got}; {self.advice}"


@dataclass(frozen=True)
class CheckResult:
    """What one check found: nothing, problems, or that it does not apply (and why)."""

    name: str
    what: str
    problems: tuple[Problem, ...] = ()
    skipped: str | None = None


def check_env(env: VecEnv, factory: Callable[[int], VecEnv] | None = None, max_steps: int = 1000) -> list[Problem]:
    """Return everything that is wrong with an environment, which is closed afterwards."""
    return [problem for result in run_checks(env, factory, max_steps) for problem in result.problems]


def run_checks(env: VecEnv, factory: Callable[[int], VecEnv] | None = None, max_steps: int = 1000) -> list[CheckResult]:
    """Make all checks and return a result for each; the environment is closed afterwards."""
    probe = Probe(env, factory, max_steps)
    results: list[CheckResult] = []
    broken: str | None = None
    for name, check in CHECKS.items():
        what = (check.__doc__ or "").strip()
        if broken is not None and name != "close":
            results.append(CheckResult(name, what, skipped=f"not tried, because {broken!r} failed"))
            continue
        result = _run(name, what, check, probe)
        results.append(result)
        if result.problems and name in _BASIC:
            broken = name
    return results


def _run(name: str, what: str, check: Check, probe: Probe) -> CheckResult:
    found: list[Finding] = []
    try:
        for finding in check(probe):
            found.append(finding)
    except NotApplicable as reason:
        if not found:
            return CheckResult(name, what, skipped=str(reason))
    except Exception as error:  # noqa: BLE001 - an environment may fail in any way; that is what is reported
        last = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        found.append(Finding("no exception", got, "make it work, or raise it where the cause is"))
    return CheckResult(name, what, tuple(Problem(name, *finding) for finding in found))
