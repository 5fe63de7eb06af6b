"""What can be said about a run before a weight is loaded: the arithmetic of its batch, and what is wrong
with it.

Everything here is a pure function of the configuration and of gathered facts; nothing reads a file or
imports torch.
"""

from covey.plan.batch import BatchPlan, batch_plan
from covey.plan.checks import checks
from covey.plan.facts import Facts, MissingColumn, ResumeFacts, UnreadableFile

__all__ = ["BatchPlan", "Facts", "MissingColumn", "ResumeFacts", "UnreadableFile", "batch_plan", "checks"]
