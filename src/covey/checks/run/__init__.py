"""What covey looks up and judges of the run and its machine."""
