"""What covey looks up and judges of the live objects of a program."""
