"""The scheduling domain under a virtual clock of its own, with an event-per-request engine model.

`python -m scheduler_svc.simulation`, which is what `sluice simulate` runs.
"""
