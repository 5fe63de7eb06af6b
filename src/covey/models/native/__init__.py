"""What covey computes in C on a CPU: one file of vectors and products, one of the model."""
