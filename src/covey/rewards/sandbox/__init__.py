"""Where programs that a model wrote are run: a process of their own, shut off from the machine."""
