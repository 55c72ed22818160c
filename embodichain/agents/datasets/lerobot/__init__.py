"""Episodes as a LeRobotDataset v3 folder: Parquet for numbers, mp4 for cameras, JSON for what they mean.

::

    meta/info.json                              features, frame rate, totals
    meta/stats.json                             min, max, mean, std of every feature
    meta/tasks.parquet                          what was to be done
    meta/episodes/chunk-000/file-000.parquet    where each episode begins and ends
    meta/embodichain.json                       keys and types of our frames, seed and success of every episode
    data/chunk-000/file-000.parquet             frames of many episodes, one after the other
    videos/<camera>/chunk-000/file-000.mp4      their images, likewise
"""

from __future__ import annotations

from embodichain.agents.datasets.lerobot.reader import LeRobotReader, RecordedEpisodes
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter

__all__ = ["LeRobotReader", "LeRobotWriter", "RecordedEpisodes"]
