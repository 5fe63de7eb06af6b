"""The training loop."""

from __future__ import annotations

from covey.learner.annotate import annotate_and_credit
from covey.learner.update import update
from covey.training.job import Job


def run(job: Job) -> None:
    """Collect a rollout, learn from it step by step, record each step; until every planned step is taken.

    A resumed run enters with its buffer filled, in the middle of the rollout that it was stopped in. A signal
    ends a rollout in the middle; it is sampled again, the same, after a resume.
    """
    job.begin()
    while not job.is_done():
        if not job.buffer.rows:
            collected = job.collect()
            if collected is None:
                break
            rows = annotate_and_credit(
                collected.groups,
                job.backend,
                credit=job.objective.credit_at(job.progress.step),
                needs=job.objective.needs,
                plan=job.buffer.plan,
                comm=job.comm,
                version=None if collected.is_replayed else job.progress.step,
            )
            job.start_rollout(collected, rows)
        for batch in job.remaining_batches():
            job.hooks.begin_step()
            loss, rate = job.objective.loss_at(job.progress.step), job.objective.rate_at(job.progress.step)
            compare = job.health.guards.is_second_gradient_due(batch, is_fresh=job.buffer.done == 0)
            told = job.hooks.before_optimizer
            result = update(batch, job.backend, loss, rate, job.comm, compare=compare, before_step=told)
            job.finish_step(batch, result)
            if job.is_done():
                break
    job.end()
