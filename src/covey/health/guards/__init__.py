"""What cannot be in a healthy run, each check with the moment at which it is made; no file imports torch or
numpy before, because `covey explain` reads the codes."""
