"""LeRobotDataset v3 folders: a writer, a reader of whoever's, and a check of what was written.

::

    meta/info.json                              features, frame rate, totals
    meta/stats.json                             min, max, mean, std and quantiles of every feature
    meta/tasks.parquet                          what was to be done
    meta/episodes/chunk-000/file-000.parquet    where each episode begins and ends, and its own statistics
    meta/embodichain.json                       keys and types of our frames, seeds and success of episodes, checksums
    data/chunk-000/file-000.parquet             frames of many episodes, one after the other
    videos/<camera>/chunk-000/file-000.mp4      their images, likewise

``lerobot`` opens a folder of ours and appends to it; the reader reads what was appended, and folders that ``lerobot``
wrote alone. A folder is data from elsewhere: whatever is wrong with it is a ``DatasetError``.
"""

from embodichain.agents.datasets.lerobot.reader import LeRobotReader, RecordedEpisodes
from embodichain.agents.datasets.lerobot.roundtrip import Trace, psnr, read_back, record
from embodichain.agents.datasets.lerobot.writer import LeRobotWriter

__all__ = ["LeRobotReader", "LeRobotWriter", "RecordedEpisodes", "Trace", "psnr", "read_back", "record"]
