"""Trainings as jobs: each in a process of this machine, forked from one that has imported torch, or in a Ray cluster.

A job continues the run in its folder if there is one. It ends with the program that started it, however that ends: what
it has learned since its last checkpoint is learned again when the run is continued.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
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
"""How long a run is waited for that its former process has not left yet."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """One training."""

    name: str
    """What it is called on the terminal."""
    config: str
    """The config's file."""
    overrides: tuple[str, ...]
    """Flags over it; the folder of the run is one of them."""
    run_dir: Path
    """Folder of the run."""
    log: Path
    """File for what the training prints."""
    trusted_modules: tuple[str, ...] = ()
    threads: int = 0
    """Torch's threads; 0: as many as torch takes."""
    gpu: str | None = None
    """The only GPU that it may use."""


def run_job(job: Job) -> None:
    """Train, or continue the run that is in the folder; the process prints to the job's file."""
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
                resume_training(job.run_dir, (), job.trusted_modules, console)
            else:
                train_from_config(job.config, job.overrides, job.trusted_modules, console)
        except BaseException as error:
            told = str(error) if isinstance(error, EmbodiChainError) else f"{type(error).__name__}: {error}"
            console.print(told, highlight=False, markup=False, soft_wrap=True)
            raise


@contextlib.contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Let everything that this process prints go to the end of a file."""
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
    """What ended it, if that was an error."""

    @abstractmethod
    def is_over(self) -> bool:
        """Tell whether it has ended; ``problem`` says then whether by an error."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to save a checkpoint and to end."""

    @abstractmethod
    def kill(self) -> None:
        """End it, now; calling it twice is fine."""


class ProcessJob(JobHandle):
    """A job in a process of this machine."""

    def __init__(self, job: Job) -> None:
        self._process = WorkerProcess(_in_process, (job,))

    def is_over(self) -> bool:
        """Tell whether it has ended."""
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
        """Ask it to save a checkpoint and to end."""
        if not self._process.is_closed and self._process.pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it, now."""
        self._process.kill()
        self._process.channel.close()


class RayTrainer:
    """The actor that does one job in a cluster."""

    def locate(self) -> dict[str, Any]:
        """Tell where it is."""
        return location_of_actor()

    def train(self, job: Job) -> None:
        """Do the job."""
        run_job(job)


class RayJob(JobHandle):
    """A job in a Ray cluster, all of whose machines see the folder of the run."""

    def __init__(self, job: Job, placement: PlacementCfg) -> None:
        remote = load_ray().remote(RayTrainer)
        self._job, self._is_over, self._is_located = job, False, False
        self._actor = remote.options(**placement.actor_options()).remote()
        self._answer = self._actor.locate.remote()

    def is_over(self) -> bool:
        """Tell whether it has ended."""
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
        """End it: its latest checkpoint is what there is."""
        self.kill()

    def kill(self) -> None:
        """End it, now."""
        if not self._is_over and RayCluster.is_alive():
            load_ray().kill(self._actor, no_restart=True)
        self._is_over = True


class Launcher:
    """Starts jobs, in processes of this machine or in a Ray cluster."""

    def __init__(self, jobs: int, cluster: PlacementCfg | None = None, address: str | None = None) -> None:
        """``cluster`` says what a job needs of a node; ``None`` for processes of this machine."""
        self._placement = cluster
        self._cluster = None if cluster is None else RayCluster(address, jobs, cluster)

    def start(self, job: Job) -> JobHandle:
        """Start a job."""
        return ProcessJob(job) if self._placement is None else RayJob(job, self._placement)

    def close(self) -> None:
        """Disconnect from the cluster."""
        if self._cluster is not None:
            self._cluster.close()
