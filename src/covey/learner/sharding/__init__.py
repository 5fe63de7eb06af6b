"""A policy whose weights are split over ranks: built without weights, filled a slice at a time."""
