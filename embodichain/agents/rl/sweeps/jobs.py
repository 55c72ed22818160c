"""Training jobs: each in a local process, forked from one that has imported torch, or in a Ray cluster.

A job resumes the run in its folder if there is one. It ends with the program that started it, even if that is killed;
progress since the last checkpoint is then repeated on resume.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodichain.agents.processes.channel import Channel
from embodichain.agents.processes.failure import FailureReport
from embodichain.agents.processes.pool import Heartbeat, WorkerProcess
from embodichain.agents.processes.ray_backend import (
    PlacementCfg,
    RayCluster,
    error_text,
    load_ray,
    location_of_actor,
)
from embodichain.agents.rl.run_records import is_run, is_running
from embodichain.agents.rl.train import resume_training, train_from_config
from embodichain.errors import EmbodiChainError
from embodichain.utils.console import MessageConsole, shown_messages

_LEAVE_SECONDS = 30.0
"""How long a job waits until an earlier process has left the folder of the run."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Program:
    """A subcommand that trains: its name, and its functions to start and resume a run."""

    name: str
    begin: Callable[..., object]
    """``(config, overrides, trusted_modules, console)``"""
    resume: Callable[..., object]
    """``(run_dir, overrides, trusted_modules, console)``"""


TRAIN = Program("train", train_from_config, resume_training)


@dataclass(frozen=True)
class Job:
    """One training."""

    name: str
    """Name on the terminal."""
    config: str
    """Config file."""
    overrides: tuple[str, ...]
    """Flags that change the config, including the folder of the run."""
    run_dir: Path
    """Folder of the run."""
    log: Path
    """File for the output of the training."""
    trusted_modules: tuple[str, ...] = ()
    threads: int = 0
    """Number of torch threads; 0 is torch's default."""
    gpu: str | None = None
    """The only visible GPU; ``None`` for all."""
    program: Program = TRAIN
    """The subcommand; its functions are pickled by name."""


def run_job(job: Job) -> None:
    """Train, or resume the run in the folder; the output goes to the job's log file."""
    if job.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.gpu
    if job.threads:
        torch.set_num_threads(job.threads)
    deadline = time.monotonic() + _LEAVE_SECONDS
    while is_running(job.run_dir) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    with _printing_to(job.log), shown_messages():
        console = MessageConsole()
        try:
            if is_run(job.run_dir):
                job.program.resume(job.run_dir, (), job.trusted_modules, console)
            else:
                job.program.begin(job.config, job.overrides, job.trusted_modules, console)
        except BaseException as error:
            message = str(error) if isinstance(error, EmbodiChainError) else f"{type(error).__name__}: {error}"
            console.print(message, highlight=False, markup=False, soft_wrap=True)
            raise


@contextlib.contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Append everything that this process prints to a file, inside the block."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(1), os.dup(2)]
    with file.open("ab") as log:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log.fileno(), number)
    try:
        yield
    finally:
        for stream, number, former in ((sys.stdout, 1, kept[0]), (sys.stderr, 2, kept[1])):
            stream.flush()
            os.dup2(former, number)
            os.close(former)


def _in_process(channel: Channel, heartbeat: Heartbeat, job: Job) -> None:
    run_job(job)


class JobHandle(ABC):
    """A job that was started."""

    problem: str | None = None
    """The error that ended it, if any."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the job has ended; ``problem`` is set if that was by an error."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the job to save a checkpoint and end."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the job; may be called repeatedly."""


class ProcessJob(JobHandle):
    """A job in a local process."""

    def __init__(self, job: Job) -> None:
        self._process = WorkerProcess(_in_process, (job,))

    def is_over(self) -> bool:
        report = None
        with contextlib.suppress(EOFError):
            message = self._process.channel.receive(0.0)
            if message is not None and message.kind == "failed":
                report = FailureReport.from_json(message.content())
        if report is not None:
            self.problem = f"{report.exception}: {report.message}"
            self.kill()
        if self._process.is_closed:
            return True
        if not self._process.wait(0.0):
            return False
        end = self._process.describe_end()
        self.problem = None if end == "ended with exit code 0" else f"its process {end}"
        self.kill()
        return True

    def stop(self) -> None:
        if not self._process.is_closed and self._process.pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()
        self._process.channel.close()


class RayTrainer:
    """The Ray actor that runs one job."""

    def locate(self) -> dict[str, Any]:
        """Return the location of the actor."""
        return location_of_actor()

    def train(self, job: Job) -> None:
        """Run the job."""
        run_job(job)


class RayJob(JobHandle):
    """A job in a Ray cluster, whose machines all have access to the folder of the run."""

    def __init__(self, job: Job, placement: PlacementCfg) -> None:
        remote = load_ray().remote(RayTrainer)
        self._job, self._is_over, self._is_located = job, False, False
        self._actor = remote.options(**placement.actor_options()).remote()
        self._answer = self._actor.locate.remote()

    def is_over(self) -> bool:
        ray = load_ray()
        while not self._is_over and ray.wait([self._answer], timeout=0.0)[0]:
            try:
                answer = ray.get(self._answer)
            except ray.exceptions.RayError as error:
                self.problem = error_text(error).splitlines()[-1]
                self.kill()
                break
            if self._is_located:
                self.kill()
                break
            RayCluster.check_token(answer)
            self._is_located = True
            self._answer = self._actor.train.remote(self._job)
        return self._is_over

    def stop(self) -> None:
        """Kill the job; its latest checkpoint remains."""
        self.kill()

    def kill(self) -> None:
        if not self._is_over and RayCluster.is_alive():
            load_ray().kill(self._actor, no_restart=True)
        self._is_over = True


class Launcher:
    """Starts jobs in local processes or in a Ray cluster."""

    def __init__(self, jobs: int, cluster: PlacementCfg | None = None, address: str | None = None) -> None:
        """``cluster`` holds the resources of a job in a Ray cluster; ``None`` for local processes."""
        self._placement = cluster
        self._cluster = None if cluster is None else RayCluster(address, jobs, cluster)

    def start(self, job: Job) -> JobHandle:
        """Start a job."""
        return ProcessJob(job) if self._placement is None else RayJob(job, self._placement)

    def close(self) -> None:
        """Disconnect from the cluster."""
        if self._cluster is not None:
            self._cluster.close()
