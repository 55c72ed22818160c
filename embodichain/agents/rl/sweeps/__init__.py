"""Groups of runs: several seeds of one config, or a hyperparameter sweep."""
