"""Programs that end while a collector is at work: it must not keep them from ending, nor let them abort."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

CHILDREN = 6
PROGRAM = """
import os, random, sys, time

import torch

from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector
from embodichain.envs.wrappers import make_grouped
from embodichain.envs.registration import make
from tests.agents.rl.helpers import make_policy

torch.set_num_threads(1)


def begin(groups, seed):
    env = make_grouped(lambda n: make("CartPoleRL", num_envs=n, num_threads=1), 16, groups)
    cfg = AsyncCfg(num_steps=4, max_policy_lag=30, pipeline_stages=groups, kl_rows=0)
    collector = AsyncCollector(env, make_policy(env), VLABuffer(16 * 4 * 50), cfg=cfg)
    collector.collect()
    time.sleep(0.02 * random.Random(seed).random())
    return collector


# Imports take longest, so they are shared: each child ends as a Python program does, with the collector at work.
for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        kept = begin(groups=1 + number % 2, seed=number)
        if number % 3 == 1:
            del kept  # nobody can stop it any more
        if number % 3 == 2:
            raise SystemExit(3)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
@pytest.mark.timeout(200)
def test_programs_that_end_while_something_collects_do_not_abort():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CHILDREN)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert done.returncode == 0, done.stderr
    assert Counter(done.stdout.split()) == {"0": CHILDREN * 2 // 3, "3": CHILDREN // 3}, done.stderr
    assert "terminate called" not in done.stderr


HANGING = """
from embodichain.agents.rl.buffer import VLABuffer
from embodichain.agents.rl.collector import AsyncCfg, AsyncCollector
from embodichain.envs.wrappers import GroupedEnv
from embodichain.errors import EnvironmentHungError
from tests.agents.rl.async_cases import Env, make_learner

env = GroupedEnv([Env(), Env("hang", at=4)])  # for a quarter of an hour
cfg = AsyncCfg(pipeline_stages=2, num_steps=5, step_timeout=0.5)
try:
    AsyncCollector(env, make_learner().policy, VLABuffer(40), cfg=cfg).collect()
except EnvironmentHungError:
    print("hung")
"""


def test_a_group_that_hangs_does_not_keep_the_program_from_ending():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", HANGING], env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "hung\n"), done.stderr
