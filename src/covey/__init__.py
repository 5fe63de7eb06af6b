"""covey: reinforcement learning of language models with GRPO."""
