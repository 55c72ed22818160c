"""Workers that a run has left in a cluster and has no place for any more, after it was resumed with fewer of them."""

from __future__ import annotations

import logging
import time
from typing import Any

from embodichain.agents.processes.ray_session import NAMESPACE
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.ray_collect import CLAIM_SECONDS
from embodichain.agents.rl.collector.ray_names import is_stray
from embodichain.agents.rl.collector.ray_recruiting import left_behind
from embodichain.errors import CollectorError
from embodichain.extras import require

log = logging.getLogger("embodichain.collector")


class Strays:
    """Asks workers to end for which neither this learner nor another rank of its run has a place.

    They would hold what they need of the cluster until ``orphan_timeout``. One whose learner is still there refuses.
    """

    def __init__(self, cfg: AsyncCfg) -> None:
        self._ray: Any = require("ray", extra="ray")
        self._until = time.monotonic() + CLAIM_SECONDS
        self._asked: dict[Any, tuple[str, Any]] = {}
        if cfg.address is None or not cfg.name:
            return
        listed = self._ray.util.list_named_actors(all_namespaces=True)
        for name in (entry["name"] for entry in listed if entry["namespace"] == NAMESPACE):
            actor = left_behind(name) if is_stray(name, cfg.name, cfg.num_workers) else None
            if actor is not None:
                self._asked[actor.dismiss.options(concurrency_group="claims").remote()] = (name, actor)

    def look(self) -> None:
        """Hear who has ended, and end those that do not answer; ``CollectorError`` if one has a learner."""
        if not self._asked:
            return
        for answer in self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0]:
            name, _ = self._asked.pop(answer)
            try:
                event = self._ray.get(answer)
            except self._ray.exceptions.RayError:
                log.info("worker %s of the learner before is not needed any more, and has ended", name)
                continue
            raise works_for_another(f"worker {name} (process {event['pid']} on {event['node']})")
        if time.monotonic() > self._until:
            for name, actor in self._asked.values():
                log.info("worker %s of the learner before is not needed any more and does not answer: ending it", name)
                self._ray.kill(actor, no_restart=True)
            self._asked.clear()


def works_for_another(who: str) -> CollectorError:
    """Return the error for a worker that is somebody else's."""
    return CollectorError(
        f"{who} works for another program, which goes on with the same run: end one of the two, or give collector.name "
        "a name of its own"
    )
