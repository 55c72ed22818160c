"""The places of a crew: who is in them, which are vacant, and when somebody is asked for."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from embodichain.agents.processes.ray_session import RaySession
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.ray_collect import CLAIM_SECONDS
from embodichain.agents.rl.collector.ray_hand import Hand
from embodichain.agents.rl.collector.ray_link import Event
from embodichain.agents.rl.collector.ray_recruiting import Recruiter
from embodichain.agents.rl.collector.ray_strays import Strays
from embodichain.extras import require

_RENEWAL_SECONDS = 0.2
"""How long a name is in use after its worker was ended."""


class Staff:
    """The workers of a crew, by their places."""

    def __init__(self, recruiter: Recruiter, cfg: AsyncCfg, lock: threading.RLock) -> None:
        """Have workers for all places; ``lock`` is held while something is asked of them."""
        self._ray: Any = require("ray", extra="ray")
        self._recruiter, self._lock = recruiter, lock
        self._strays = Strays(cfg)
        self.hands: dict[int, Hand] = {}
        self._vacancies = dict.fromkeys(range(cfg.num_workers), (0.0, 0))
        """Places without a worker: when the next one is asked for, and how many faults there have been in it."""

    def fill(self) -> None:
        """Ask for workers where somebody is missing."""
        self._strays.look()
        for index, (due, faults) in list(self._vacancies.items()):
            if time.monotonic() >= due:
                with self._lock:
                    hand = self._recruiter.hire(index, faults)
                    if hand is not None:
                        del self._vacancies[index]
                        self.hands[index] = hand

    def hear(self, seconds: float) -> list[tuple[Hand, Event | Exception]]:
        """Wait a moment for an answer; return what a worker says has happened, or why its answer will never come."""
        with self._lock:
            awaited = {answer: hand for hand in self.hands.values() for answer in hand.pending()}
        if not awaited:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        if not ready:
            return []
        hand = awaited[ready[0]]
        try:
            content = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            return [(hand, error)]
        with self._lock:
            if ready[0] != hand.awaited:
                hand.followed(ready[0])
                return []
            if isinstance(content, list):
                hand.listen()
                return [(hand, event) for event in content]
            hand.placed(content)
            return [(hand, content)]

    def is_there(self, hand: Hand) -> bool:
        """Tell whether a worker has not been replaced."""
        return self.hands.get(hand.index) is hand

    def is_silent(self, hand: Hand) -> bool:
        """Tell whether a worker was found that does not even say whose it is."""
        return hand.found and not hand.claimed and time.monotonic() - hand.asked_at > CLAIM_SECONDS

    def renew(self, hand: Hand) -> None:
        """Have a new worker come in the place of one that a learner before has left, which is no fault of it."""
        hand.mine = True  # nobody else has it, or it would have said so
        self.replace(hand, hand.restarts, _RENEWAL_SECONDS)

    def replace(self, hand: Hand, faults: int, pause: float) -> None:
        """Have a new worker come in the place of another, after a pause."""
        with self._lock:
            hand.kill()
            del self.hands[hand.index]
        self._vacancies[hand.index] = (time.monotonic() + pause, faults)

    def leave_to_others(self, hand: Hand) -> None:
        """Let another learner, who has this worker, have all that may be its."""
        for other in self.hands.values():
            if hand.claimed:  # it was taken over, and so will be the others
                other.mine = False
            elif not other.claimed:  # one that was made here is not the other's, unless both began at the same time
                other.mine = hand.found and not other.found

    def close(self) -> None:
        """End all workers that are this learner's."""
        if RaySession.alive():
            for hand in self.hands.values():
                with contextlib.suppress(self._ray.exceptions.RayError):  # gone with the cluster
                    hand.kill()
        self.hands.clear()
