"""What covey looks up and judges of programs of completions."""
