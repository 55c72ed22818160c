"""LeRobotDataset v3 folders: a writer, a reader, and verification of recordings.

::

    meta/info.json                              features, frame rate, totals
    meta/stats.json                             min, max, mean, std and quantiles of every feature
    meta/tasks.parquet                          language instructions
    meta/episodes/chunk-000/file-000.parquet    location and statistics of each episode
    meta/embodichain.json                       our frame layout, seeds and success of episodes, checksums
    data/chunk-000/file-000.parquet             frames of many consecutive episodes
    videos/<camera>/chunk-000/file-000.mp4      images of many consecutive episodes

``lerobot`` can open our folders and append to them. The reader also reads appended episodes, and folders written by
``lerobot`` alone. Folders are untrusted input: any defect raises ``DatasetError``.
"""

from embodichain.agents.datasets.lerobot.reader import LeRobotReader, RecordedEpisodes
from embodichain.agents.datasets.lerobot.roundtrip import Trace, psnr, read_back, record
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter

__all__ = ["LeRobotReader", "LeRobotWriter", "RecordedEpisodes", "Trace", "psnr", "read_back", "record"]
