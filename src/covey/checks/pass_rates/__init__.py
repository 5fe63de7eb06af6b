"""What covey looks up and judges of measured pass rates."""
