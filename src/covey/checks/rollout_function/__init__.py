"""A function of the user that makes the completions of a rollout."""
