"""Names of the metrics that several rules read."""

from __future__ import annotations

LENGTH = "completions/mean_length"
ENDED = "completions/mean_terminated_length"
CUT = "completions/clipped_ratio"
REPETITIVE = "completions/repetitive_ratio"
IDENTICAL = "completions/identical_groups"
UNPARSED = "completions/unparsed_ratio"
UNKNOWN_IDS = "completions/unknown_ids_ratio"
MOST_COMMON = "completions/most_common_ratio"
PAID_LENGTH = "completions/reward_length_correlation"
INVALID = "rows/invalid"
NO_SPREAD = "frac_reward_zero_std"
ENTROPY = ("entropy_sampled", "entropy", "entropy/mean")
"""Names of the entropy, of which the first that is there counts: covey's own `entropy` leaves out the rows
without an advantage, which in a collapsed run are all of them."""
