"""What cannot be in a healthy run, each check with the moment at which it is made; nothing here imports torch
before."""
