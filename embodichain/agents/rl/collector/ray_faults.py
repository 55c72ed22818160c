"""What is wrong with a worker of a cluster, judged by how its answers fail, or fail to come."""

from __future__ import annotations

import time

from embodichain.agents.processes.ray_session import error_text, node_died, node_is_gone
from embodichain.agents.rl.collector.background.watched import Fault
from embodichain.agents.rl.collector.config import AsyncCfg
from embodichain.agents.rl.collector.ray_collect import POLL_SECONDS
from embodichain.agents.rl.collector.ray_hand import Hand


def fault_of_error(error: Exception, hand: Hand) -> Fault:
    """Return what has become of a worker, an answer of which failed."""
    text = error_text(error)
    if node_died(error, hand.node_id):
        return Fault(f"is gone with its node {hand.node}".rstrip(), text, lost=True)
    if hand.found and not hand.node:  # it was about to end when it was found
        return Fault("of the learner before has ended", lost=True)
    return Fault(f"died: {text.splitlines()[-1]}", text)


def fault_of_silence(hand: Hand, cfg: AsyncCfg) -> Fault | None:
    """Return what is wrong with a worker that has owed an answer for too long."""
    silent = time.monotonic() - hand.asked_at
    if silent > (cfg.start_timeout if hand.doubted else POLL_SECONDS + cfg.step_timeout) and (
        hand.ready or hand.doubted
    ):
        return Fault(f"cannot be reached for {silent:.0f} s", hung=True, lost=node_is_gone(hand.node_id))
    if hand.oldest_order > cfg.start_timeout:
        return Fault(f"has not followed an order for {hand.oldest_order:.0f} s", hung=True)
    if hand.node and not hand.ready and silent > cfg.start_timeout:
        return Fault(f"did not build its environment within start_timeout ({cfg.start_timeout:g} s)", hung=True)
    return None
