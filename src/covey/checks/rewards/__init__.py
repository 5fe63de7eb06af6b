"""What covey looks up and judges of the rewards."""
