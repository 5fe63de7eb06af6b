"""What can be said about a run before a weight is loaded: the arithmetic of its batch, and what is wrong
with it.

Everything here is a pure function of the configuration and of gathered facts; nothing reads a file or
imports torch. `import covey` imports this package, as each reward worker does: it imports nothing itself.
"""
