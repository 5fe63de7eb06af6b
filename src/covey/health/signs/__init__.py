"""Rules over the records of a run, each with the code under which it speaks."""
