"""What covey looks up and judges of LoRA."""
