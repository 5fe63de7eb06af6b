"""The embedded default task, two-digit addition, and the small model that starts on it."""
