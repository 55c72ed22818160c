"""The tasks of this package, one file each."""
