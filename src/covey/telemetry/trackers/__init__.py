"""Experiment trackers: what the files hold, sent on to tensorboard, wandb, swanlab, mlflow and trackio.

A tracker may fail, block or end its thread without touching the run.
"""
