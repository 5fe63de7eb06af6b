"""Engines behind HTTP: the server around one, and the client that samples on several."""
