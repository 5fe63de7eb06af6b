"""The built-in rewards: covey's own, and those of ms-swift and TRL by the names they have there."""
