"""What is true of the machine, the model, the data and the rewards before a run; torch-free."""

from covey.training.facts.model import fetch_model, model_dir
from covey.training.facts.survey import Survey, survey

__all__ = ["Survey", "fetch_model", "model_dir", "survey"]
