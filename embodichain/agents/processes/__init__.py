"""What it takes to work with other processes, of this machine or of a cluster, whatever they do there."""
