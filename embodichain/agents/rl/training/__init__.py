"""What surrounds the training loop of ``trainer.py``: settings, run folder, logs, schedules, guards."""
