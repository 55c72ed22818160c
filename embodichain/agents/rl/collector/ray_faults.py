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
    if node_died(error, hand.node_id):  # what Ray says of it are ids alone
        return Fault(f"is gone with its node {hand.node}".rstrip(), lost=True)
    text = error_text(error)
    return Fault(f"died: {text.splitlines()[-1]}", text)


def fault_of_silence(hand: Hand, cfg: AsyncCfg) -> Fault | None:
    """Return what is wrong with a worker that has owed an answer for too long."""
    if not hand.claimed and (hand.found or not hand.doubted):
        return None  # it waits for a node, or for its answer whose it is
    now, start = time.monotonic(), cfg.start_timeout
    silent = now - hand.asked_at
    if silent > (POLL_SECONDS + cfg.step_timeout if hand.ready else start):
        return Fault(f"cannot be reached for {silent:.0f} s", hung=True, lost=node_is_gone(hand.node_id))
    if not hand.ready and not hand.doubted and now - hand.claimed_at > start:
        return Fault(f"did not build its environment within start_timeout ({start:g} s)", hung=True)
    if hand.oldest_order > start:
        return Fault(f"has not followed an order for {hand.oldest_order:.0f} s", hung=True)
    return None
