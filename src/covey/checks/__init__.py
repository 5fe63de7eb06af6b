"""What covey looks up, judges and says before a run, one module or package per subject; torch-free."""
