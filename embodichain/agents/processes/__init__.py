"""Worker processes on this machine or in a Ray cluster, and the channels and shared memory between them."""
